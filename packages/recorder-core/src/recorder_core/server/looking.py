"""The routes that the trajectory page reads: of an engine, or of a server over several."""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response
from starlette.routing import Route

from recorder_core.codec import encode_hook
from recorder_core.errors import NothingRecordedError, RecorderError
from recorder_core.keys import RecordKey
from recorder_core.protocol import (
    MAX_RECENT,
    MAX_WAIT_S,
    PiecesReply,
    PiecesRequest,
)
from recorder_core.recent import Recent
from recorder_core.runs import Run
from recorder_core.server.bodies import read_body, reads
from recorder_core.view.forest import forest_of, leaf_arrays
from recorder_core.view.pieces import NoPiecesError, Pieces
from recorder_core.view.shell import VIEW, show, show_file

_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}
_JSON: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {}}}}}

Result = TypeVar("Result")
Key = Annotated[str, Query(description="One run, <batch>/<task>/<run>.")]


class Looked(Protocol):
    """What the page is about."""

    recent: Recent

    async def run(self, key: RecordKey) -> Run | None:
        """A run, with what was drained of it and is still kept; None where there is nothing."""
        ...

    def drained(self, key: RecordKey) -> bool:
        """Whether some of a run was handed out."""
        ...

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """The bytes of token ids.

        Raises:
            RecorderError: They are not known.
        """
        ...


def add_page(router: APIRouter) -> None:
    """Serve the page; it holds no data, and is given to whoever asks."""
    # Plain routes: the router's own ask for the key.
    router.routes.append(Route(VIEW, show, include_in_schema=False))
    router.routes.append(Route(f"{VIEW}/{{name}}", show_file, include_in_schema=False))


def add_looking(router: APIRouter, looked: Looked, threads: Executor) -> None:
    """Add the routes that the page reads.

    Args:
        router: With the prefix `/records`.
        looked: What they tell of.
        threads: Where it is worked out.
    """

    async def on_thread(function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    async def run_of(key: str) -> tuple[Run, bool]:
        wanted = RecordKey.parse(key)
        run = await looked.run(wanted)
        if run is None:
            raise HTTPException(
                404,
                f"nothing is kept of {wanted}: it was never here, or was deleted, evicted, or "
                "drained longer ago than is remembered",
            )
        return run, looked.drained(wanted)

    @router.get("/recent", responses=_JSON, response_model=None)
    async def recent(
        after: Annotated[str, Query(description="`next` of the reply before.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_RECENT)] = 2_000,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> Response:
        """What finished lately, in brief, oldest first; waits for news where there is none."""
        if wait_s:
            await _news(looked.recent, after, wait_s)
        return _json(looked.recent.since(after, limit))

    @router.get("/forest", responses=_JSON, response_model=None)
    async def forest(
        key: Key,
        texts: Annotated[bool, Query(description="With the records' texts.")] = False,
    ) -> Response:
        """A run: its generations, its trajectories, and what is trained where."""
        run, drained = await run_of(key)

        def made() -> Response:
            view = forest_of(run, texts=texts)
            view.drained = drained
            return _json(view)

        return await on_thread(made)

    @router.get("/tokens", responses=_BYTES, response_model=None)
    async def tokens(key: Key, leaf: Annotated[str, Query()]) -> Response:
        """A trajectory's ids (int32), then its logprobs (float32), little-endian."""
        run, _ = await run_of(key)
        try:
            made = await on_thread(functools.partial(leaf_arrays, run, leaf))
        except NothingRecordedError as error:
            raise HTTPException(404, str(error)) from None
        return Response(made, media_type="application/octet-stream", headers=_FRESH)

    add_pieces(router, looked.pieces)


def add_pieces(router: APIRouter, find: Callable[[list[int]], Awaitable[list[bytes]]]) -> None:
    """Add the route that tells the bytes of tokens.

    Args:
        router: With the prefix `/records`.
        find: The bytes of token ids; raises RecorderError.
    """

    @router.post("/pieces", openapi_extra=reads(PiecesRequest))
    async def pieces(request: Request) -> PiecesReply:
        """The bytes of tokens, from the engine's own tokenizer."""
        body = await read_body(PiecesRequest, request)
        try:
            found = await find(body.ids)
        except RecorderError as error:
            raise HTTPException(501, str(error)) from None
        return PiecesReply(pieces=[base64.b64encode(each).decode() for each in found])


def finder(
    pieces: Pieces | None, threads: Executor, count_error: Callable[..., None]
) -> Callable[[list[int]], Awaitable[list[bytes]]]:
    """What asks an engine's tokenizer, on a thread.

    Args:
        pieces: The bytes of token ids; None if there is no tokenizer to ask.
        threads: Where it is asked.
        count_error: Logs and counts an exception that is being handled.
    """

    async def find(ids: list[int]) -> list[bytes]:
        if pieces is None:
            raise NoPiecesError("this server has no tokenizer to ask")
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, pieces, ids)
        except RecorderError:
            raise
        except Exception as error:  # a tokenizer of any make
            count_error("the bytes of %d tokens were not found", len(ids))
            raise NoPiecesError(f"the tokenizer failed: {error!r}") from error

    return find


_FRESH = {"Cache-Control": "no-store"}


def _json(value: Any) -> Response:
    content = msgspec.json.encode(value, enc_hook=encode_hook)
    return Response(content, media_type="application/json", headers=_FRESH)


async def _news(recent: Recent, after: str, wait_s: float) -> None:
    loop, come = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(come.set)

    cancel = recent.when_news(after, tell)
    if cancel is None:
        return
    try:
        await asyncio.wait_for(come.wait(), wait_s)
    except asyncio.TimeoutError:
        pass
    finally:
        cancel()
