"""A wire that loses requests and replies, between a client and a real server."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx

FAULTS = ["not sent", "reply lost", "reply cut", "reply a proxy's", "sent twice"]


class Wire(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Each request meets the fault on its first try; the next one passes.

    Args:
        fault: One of `FAULTS`.
        tries: How many tries of a request meet it.
    """

    def __init__(self, fault: str, *, tries: int = 1) -> None:
        self.seen: Counter[tuple[str, str, bytes]] = Counter()
        self._fault = fault
        self._tries = tries
        self._sync = httpx.HTTPTransport()
        self._async = httpx.AsyncHTTPTransport()

    def _meets(self, request: httpx.Request) -> bool:
        # The name that a lease is given by default is another each time.
        name = (request.method, request.url.raw_path.decode(), request.content)
        self.seen[name] += 1
        return self.seen[name] <= self._tries

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        if not self._meets(request):
            return self._sync.handle_request(request)
        if self._fault == "not sent":
            raise httpx.ConnectError("refused", request=request)
        response = self._sync.handle_request(request)
        if self._fault == "reply cut":
            return self._cut(response, response.read())
        response.read()
        response.close()
        if self._fault == "sent twice":
            return self._sync.handle_request(request)
        return self._lost(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if not self._meets(request):
            return await self._async.handle_async_request(request)
        if self._fault == "not sent":
            raise httpx.ConnectError("refused", request=request)
        response = await self._async.handle_async_request(request)
        if self._fault == "reply cut":
            return self._cut(response, await response.aread())
        await response.aread()
        await response.aclose()
        if self._fault == "sent twice":
            return await self._async.handle_async_request(request)
        return self._lost(request)

    def _lost(self, request: httpx.Request) -> httpx.Response:
        if self._fault == "reply a proxy's":
            return httpx.Response(502, html="<html>Bad gateway</html>")
        raise httpx.RemoteProtocolError("disconnected", request=request)

    def _cut(self, response: httpx.Response, content: bytes) -> httpx.Response:
        headers = {"content-type": response.headers.get("content-type", "")}
        return httpx.Response(response.status_code, headers=headers, stream=_Cut(content))

    def close(self) -> None:
        self._sync.close()

    async def aclose(self) -> None:
        await self._async.aclose()


class _Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The first half of a reply."""

    def __init__(self, content: bytes) -> None:
        self._half = content[: len(content) // 2]

    def __iter__(self) -> Iterator[bytes]:
        yield self._half
        raise httpx.RemoteProtocolError("incomplete body")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._half
        raise httpx.RemoteProtocolError("incomplete body")
