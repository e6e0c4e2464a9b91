"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

import tinker
from fastapi.responses import JSONResponse

_LIMIT = 2_000


class APIError(Exception):
    """A request that cannot be answered.

    Args:
        message: What was wrong, and what would be right.
        status: The HTTP status.
        param: The field that is at fault.
        code: A word for programs.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> JSONResponse:
        """The reply."""
        return error_response(str(self), self.status, param=self.param, code=self.code)


def error_response(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """An error as OpenAI writes it."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    text = message[:_LIMIT].encode(errors="backslashreplace").decode()
    error: dict[str, Any] = {"message": text, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def of_the_service(error: Exception) -> APIError:
    """What the agent is told of an error of Tinker's."""
    status = getattr(error, "status_code", None)
    if isinstance(error, tinker.RateLimitError):
        return APIError(f"Tinker is busy: {error}", 429)
    if status in (400, 422):
        return APIError(f"Tinker refused the request: {error}", 400)
    # Not the agent's to mend, 401 included: the key of the service is the server's.
    return APIError(f"Tinker could not sample: {error}", 502)
