"""Routes that ask a guard first, and answer the package's errors as HTTP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError

from recorder_core.errors import (
    CodecError,
    InvalidKeyError,
    LeaseError,
    MissingParentError,
    NotSavedError,
    StoreClosedError,
)
from recorder_core.protocol import NOT_SAVED

_MESSAGE_LIMIT = 2_000
_FAULTS_LIMIT = 20

_STATUS: dict[type[Exception], int] = {
    InvalidKeyError: 400,
    CodecError: 400,
    LeaseError: 404,
    MissingParentError: 409,
    StoreClosedError: 503,
    NotSavedError: NOT_SAVED,
    ValueError: 400,
}


def _explain(error: RequestValidationError | ValidationError) -> str:
    # Not the framework's own reply: it repeats the input, which JSON cannot always express.
    faults = islice(error.errors(), _FAULTS_LIMIT)
    problems = ((each["loc"], each["msg"]) for each in faults)
    return "; ".join(f"{'.'.join(map(str, where))}: {what}" for where, what in problems)


def _refusal(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    detail = text[:_MESSAGE_LIMIT].encode(errors="backslashreplace").decode()
    return JSONResponse({"detail": detail}, status, headers)


def guarded_by(guard: Callable[[Request], None]) -> type[APIRoute]:
    """A route that asks the guard before it reads a body, and answers our errors as HTTP.

    Answers, not raises: engines log what reaches their own handlers, some with all that it is
    chained to, the request's body among it.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handler = super().get_route_handler()

            @functools.wraps(handler)
            async def guarded(request: Request) -> Response:
                try:
                    guard(request)
                    response: Response = await handler(request)
                except HTTPException as error:
                    return _refusal(error.status_code, str(error.detail), error.headers)
                except (RequestValidationError, ValidationError) as error:
                    return _refusal(422, _explain(error))
                except tuple(_STATUS) as error:
                    status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
                    return _refusal(status, str(error))
                return response

            return guarded

    return GuardedRoute
