"""A front end's `/records`: passed on to the recorder process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from recorder_core.host.messages import Folder
from recorder_core.protocol import PREFIX, VersionRequest
from recorder_core.server.bodies import read_body, reads
from recorder_core.server.guarding import guarded_by
from recorder_core.server.looking import add_page, add_pieces, finder
from recorder_core.view.pieces import Pieces

_METHODS = ["GET", "PATCH", "PUT", "DELETE", "POST"]
# What belongs to one connection, and not to the request or reply.
_HOP = {"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade"}
# The record keys and the admin key are this process's concern.
_OURS = {"authorization", "cookie", "host", "x-api-key"}


def passing_router(
    folder: Folder,
    *,
    guard: Callable[[Request], None],
    set_version: Callable[[str], Awaitable[None]],
    pieces: Pieces,
    count_error: Callable[..., None],
) -> APIRouter:
    """The routes of `records_router`, answered by the recorder process.

    Args:
        folder: Where the process is found.
        guard: Called with each request before its body is read; raises HTTPException.
        set_version: Tells the engine the label of its weights.
        pieces: The bytes of token ids, from the engine's tokenizer, called on a thread.
        count_error: Logs and counts an exception that is being handled.
    """
    router = APIRouter(prefix=PREFIX, tags=["records"], route_class=guarded_by(guard))
    http = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=folder.http, limits=httpx.Limits()),
        base_url="http://recorder",
        timeout=httpx.Timeout(None),
        trust_env=False,
    )

    @router.post(
        "/version", status_code=204, response_model=None, openapi_extra=reads(VersionRequest)
    )
    async def version(request: Request) -> None:
        """The label of the weights, for trainers that push weights by a call of their own."""
        await set_version((await read_body(VersionRequest, request)).version)

    threads = ThreadPoolExecutor(1, thread_name_prefix="records")
    add_pieces(router, finder(pieces, threads, count_error))
    add_page(router)

    async def passed(request: Request) -> Response:
        headers = [
            (name, value)
            for name, value in request.headers.raw
            if name.decode("latin-1").lower() not in _HOP | _OURS
        ]
        body = request.stream() if request.method in ("PATCH", "PUT", "POST") else None
        asked = http.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=headers,
            content=body,
        )
        try:
            reply = await http.send(asked, stream=True)
        except httpx.TransportError as error:
            raise HTTPException(
                503, f"the recorder process does not answer ({error!r}); it is started again"
            ) from None

        async def pieces_of_it() -> AsyncIterator[bytes]:
            try:
                async for piece in reply.aiter_raw():
                    yield piece
            finally:
                await reply.aclose()

        kept = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
        return StreamingResponse(pieces_of_it(), reply.status_code, kept)

    for path in ("", "/{path:path}"):
        router.add_api_route(path, passed, methods=_METHODS, include_in_schema=False)
    return router
