"""A client's request, which reaches the scheduler as one generation for each of its samples."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from recorder_core.context import MISSING, Identity, current_identity

_SHOWS_NO_TOKEN = ("/health", "/health_generate", "/v1/score", "/v1/rerank")
"""SGLang's routes that generate, or nearly so, for the sake of something else."""


class ClientRequest:
    """What the generations of one `generate_request` have in common.

    Args:
        identity: Whom it is recorded for.
        asked: SGLang's `GenerateReqInput`; None where it is not known.
        route: The path of the HTTP route that it came by; empty without HTTP.
    """

    __slots__ = ("__weakref__", "_asked", "_prefills", "_route", "identity", "request_id", "sent")

    def __init__(self, identity: Identity, asked: Any = None, route: str = "") -> None:
        self.identity = identity
        self.request_id = ""
        self.sent = 0
        self._asked = asked
        self._route = route
        self._prefills = 0

    @classmethod
    def here(cls, asked: Any = None, http: Any = None) -> ClientRequest:
        """A request of whoever is being served.

        Args:
            asked: SGLang's `GenerateReqInput`.
            http: The `fastapi.Request` that it came by.
        """
        route = http.scope.get("route") if http is not None else None
        return cls(current_identity() or MISSING, asked, getattr(route, "path", ""))

    def is_own_prefill(self) -> bool:
        """Whether a request of no new tokens is SGLang's own, ahead of a prompt's samples.

        Before it sends `n` samples of each prompt it has each prompt's cache filled.
        """
        if getattr(self._asked, "parallel_sample_num", 1) == 1:
            return False
        self._prefills += 1
        return self._prefills <= int(self._asked.batch_size)

    @property
    def shows_no_token(self) -> bool:
        """Whether the reply holds nothing that is sampled: a probe, a score."""
        return self._route in _SHOWS_NO_TOKEN


_current: ContextVar[ClientRequest | None] = ContextVar("recorder_client_request", default=None)


def current_request() -> ClientRequest:
    """The request that is being sent to the scheduler."""
    return _current.get() or ClientRequest.here()


class Replies:
    """As SGLang's generator of replies; its first step knows whose request it answers."""

    __slots__ = ("_begun", "_generator", "_request")

    def __init__(self, generator: Any, request: ClientRequest) -> None:
        self._generator = generator
        self._request = request
        self._begun = False

    def __aiter__(self) -> Replies:
        """Itself."""
        return self

    def __anext__(self) -> Any:
        """The next reply; every request is sent before the first one."""
        if self._begun:
            return self._generator.__anext__()
        self._begun = True
        return self._first()

    async def _first(self) -> Any:
        token = _current.set(self._request)
        try:
            return await self._generator.__anext__()
        finally:
            _current.reset(token)

    def asend(self, value: Any) -> Any:
        """As the generator's."""
        return self.__anext__() if value is None else self._generator.asend(value)

    def athrow(self, *error: Any) -> Any:
        """As the generator's."""
        return self._generator.athrow(*error)

    def aclose(self) -> Any:
        """As the generator's."""
        return self._generator.aclose()
