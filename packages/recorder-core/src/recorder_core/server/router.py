"""The `/records` routes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from recorder_core.codec import (
    MEDIA_TYPE,
    Head,
    StreamDecoder,
    as_json,
    decode_runs,
    encode_runs,
    encode_stream,
)
from recorder_core.errors import NotSavedError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.local import Now, Taken, new_lease, records_of
from recorder_core.protocol import (
    MAX_KEYS,
    MAX_RUNS_AS_JSON,
    PREFIX,
    BlockRequest,
    CountReply,
    DrainRequest,
    ExtendRequest,
    FlushReply,
    ForgetRequest,
    KeyReply,
    LeaseRequest,
    StatsReply,
    SweepRequest,
    UpdateReply,
    UpdateRequest,
    VersionRequest,
    selection,
)
from recorder_core.recorder import Recorder
from recorder_core.runs import Run
from recorder_core.server.bodies import read_body, reads
from recorder_core.server.guarding import guarded_by
from recorder_core.server.looking import add_looking, add_page, finder
from recorder_core.stores import RecordStore
from recorder_core.trajectories import assemble
from recorder_core.view.pieces import Pieces

Result = TypeVar("Result")

# Copying and assembling many runs takes a while: it must neither hold up the event loop nor fill
# the thread pool that the engine's own handlers use.
_THREADS = 2
_FLUSH_TIMEOUT_S = 30.0
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


def _where(
    prefix: Annotated[
        str | None, Query(description="Leading components of record keys; empty for all.")
    ] = None,
    key: Annotated[str | None, Query(description="One run, <batch>/<task>/<run>.")] = None,
) -> Selection:
    return selection(prefix, key)


Where = Annotated[Selection, Depends(_where)]
After = Annotated[
    str | None, Query(alias="after", description="Only keys that come after this one.")
]


def records_router(
    recorder: Recorder,
    *,
    guard: Callable[[Request], None],
    set_version: Callable[[str], Awaitable[None]] | None = None,
    pieces: Pieces | None = None,
) -> APIRouter:
    """The routes through which workflows and schedulers reach an engine's records.

    Args:
        recorder: Whose store is served.
        guard: Called with each request before its body is read; raises HTTPException.
        set_version: Tells the engine the label of its weights; None if it has none to set.
        pieces: The bytes of token ids, from the engine's tokenizer, called on a thread; None if it
            has none to ask.
    """
    router = APIRouter(prefix=PREFIX, tags=["records"], route_class=guarded_by(guard))
    store, now = recorder.store, Now(recorder)
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="records")

    async def after(function: Callable[[], Result]) -> Result:
        """Do what takes microseconds, after everything that has finished so far is stored.

        On the recorder's thread, in the order of arrival: it waits for no read.
        """
        return await asyncio.wrap_future(recorder.after(function))

    async def write(function: Callable[[], Result], *, records: bool = False) -> Result:
        """As `after`, for what changes the store: it is answered when it is safe."""
        return await asyncio.wrap_future(recorder.write(function, records=records))

    async def flushed() -> bool:
        waiting = asyncio.wrap_future(recorder.write(lambda: None, records=True))
        done, _ = await asyncio.wait([waiting], timeout=_FLUSH_TIMEOUT_S)
        return bool(done) and not isinstance(waiting.exception(), NotSavedError)

    async def read(function: Callable[..., Result], *args: Any) -> Result:
        """Do what may take long, on a thread, after everything that has finished is stored."""
        await flushed()
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    async def settled(where: Selection, wait_s: float) -> None:
        """Wait until nothing that is selected is in flight."""
        loop, idle = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(idle.set)

        # After what has begun so far, in whatever process.
        cancel = await after(lambda: recorder.when_idle(where, tell))
        if cancel is None:
            return
        try:
            await asyncio.wait_for(idle.wait(), wait_s)
        except asyncio.TimeoutError:
            pass
        finally:
            cancel()

    @router.get("/keys")
    async def list_keys(
        where: Where,
        after_key: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_KEYS)] = MAX_KEYS,
    ) -> list[KeyReply]:
        """What is recorded and what is in flight, run by run, a page at a time."""
        last = None if after_key is None else RecordKey.parse(after_key)
        return await after(lambda: now.keys(where, last, limit))

    @router.get("", responses=_STREAM, response_model=None)
    async def get_records(
        request: Request,
        where: Where,
        after_key: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_RUNS_AS_JSON)] = 100,
        recent: Annotated[
            bool, Query(description="In a stream: with what was drained and is still kept.")
        ] = False,
    ) -> Response | list[Experience]:
        """The runs that are selected; where the client asks for JSON, assembled, a page of them."""
        if "application/json" in request.headers.get("accept", ""):
            last = None if after_key is None else RecordKey.parse(after_key)

            def page() -> bytes:
                keys = [each.key for each in store.keys(where, after=last, limit=limit)]
                return as_json(assemble(run for key in keys for run in now.runs(key)))

            return Response(await read(page), media_type="application/json")
        return _streamed(await read(functools.partial(now.runs, where, drained=recent)), Head())

    @router.patch("", openapi_extra=reads(UpdateRequest))
    async def update(request: Request) -> UpdateReply:
        """Write a reward or info: to the run, or to some of its generations."""
        body = await read_body(UpdateRequest, request)
        updated = await write(
            lambda: store.update(
                body.key,
                sample_ids=body.sample_ids,
                reward=body.reward,
                info=body.info,
                token_level_reward=body.token_level_reward,
            )
        )
        return UpdateReply(updated=updated.records, unknown=list(updated.unknown))

    @router.put("", openapi_extra={"requestBody": {"content": _STREAM[200]["content"]}})
    async def overwrite(
        request: Request,
        key: Annotated[str, Query(description="A record key, <batch>/<task>/<run>.")],
    ) -> CountReply:
        """Replace all that a key has by the records in the body."""
        wanted, decoder = RecordKey.parse(key), StreamDecoder()
        async for piece in request.stream():
            decoder.feed(piece)

        def check() -> Iterable[Run]:
            # Written and read once more, and shown: what goes in can be drained and assembled.
            runs = decode_runs(encode_runs(decoder.close()))
            as_json(assemble(runs))
            return runs

        records = records_of(await asyncio.get_running_loop().run_in_executor(threads, check))
        await write(lambda: store.overwrite(wanted, records), records=True)
        return CountReply(records=len(records))

    @router.delete("")
    async def delete(where: Where) -> CountReply:
        """Delete the runs that are selected, leased ones included."""
        return CountReply(records=await write(lambda: store.remove(where)))

    @router.post("/drain", responses=_STREAM, openapi_extra=reads(DrainRequest))
    async def drain(request: Request) -> Response:
        """Hand runs out; they come back unless acknowledged in time."""
        body = await read_body(DrainRequest, request)
        where, lease = body.where, body.lease or new_lease()
        if body.wait_s:
            await settled(where, body.wait_s)
        began = time.perf_counter()

        def take(complete: bool = True) -> Taken:
            return now.take(where, lease, body.lease_s, body.max_bytes, complete)

        taking = recorder.write(take)
        waiting = asyncio.wrap_future(taking)
        done, _ = await asyncio.wait([waiting], timeout=_FLUSH_TIMEOUT_S)
        try:
            if not done and taking.cancel():
                # Behind a long backlog: what is there, and the reply says so.
                taken = take(complete=False)
                await asyncio.wrap_future(_safe(store))
            else:
                taken = await waiting
        except NotSavedError:
            recorder.write(lambda: store.release(lease))  # this caller gets none of the runs
            raise
        head = Head(lease, taken.pending, taken.flushed, taken.lease.more)

        def sent(size: int) -> None:
            recorder.measures.drain_seconds.observe(time.perf_counter() - began)
            recorder.measures.drain_bytes.observe(size)

        return _streamed(taken.lease.runs, head, sent)

    @router.post("/ack", openapi_extra=reads(LeaseRequest))
    async def ack(request: Request) -> CountReply:
        """The drained runs are safe with the caller: forget them."""
        body = await read_body(LeaseRequest, request)
        return CountReply(records=await write(lambda: store.ack(body.lease)))

    @router.post("/release", openapi_extra=reads(LeaseRequest))
    async def release(request: Request) -> CountReply:
        """Put the drained runs back at once."""
        body = await read_body(LeaseRequest, request)
        return CountReply(records=await write(lambda: store.release(body.lease)))

    @router.post(
        "/extend", status_code=204, response_model=None, openapi_extra=reads(ExtendRequest)
    )
    async def extend(request: Request) -> None:
        """Begin a lease's time anew."""
        body = await read_body(ExtendRequest, request)
        await write(lambda: store.extend(body.lease, body.lease_s))

    @router.post("/block", status_code=204, response_model=None, openapi_extra=reads(BlockRequest))
    async def block(request: Request) -> None:
        """Refuse records there from now on; what is there stays."""
        body = await read_body(BlockRequest, request)
        await write(lambda: store.block(body.where))

    @router.post("/forget", openapi_extra=reads(ForgetRequest))
    async def forget(request: Request) -> CountReply:
        """Refuse records there from now on, and delete those that are there."""
        body = await read_body(ForgetRequest, request)
        prefixes = [KeyPrefix(each) for each in body.prefixes]
        return CountReply(records=await write(lambda: now.forget(prefixes)))

    @router.post("/sweep", openapi_extra=reads(SweepRequest))
    async def sweep(request: Request) -> CountReply:
        """Delete runs that nothing was added to for so long."""
        body = await read_body(SweepRequest, request)
        return CountReply(records=await write(lambda: store.sweep(body.older_than_s)))

    @router.post(
        "/version", status_code=204, response_model=None, openapi_extra=reads(VersionRequest)
    )
    async def version(request: Request) -> None:
        """The label of the weights, for trainers that push weights by a call of their own."""
        body = await read_body(VersionRequest, request)
        if set_version is None:
            raise HTTPException(501, "this engine has no weight-version label to set")
        await set_version(body.version)

    @router.post("/flush")
    async def flush() -> FlushReply:
        """Wait until everything that has finished is stored."""
        return FlushReply(flushed=await flushed())

    @router.get("/stats")
    async def stats() -> StatsReply:
        """Counters of the recorder and of its store."""
        return await after(now.stats)

    find = finder(pieces, threads, recorder.count_error)

    class Here:
        """What the page is about: this recorder."""

        recent = recorder.recent

        async def run(self, key: RecordKey) -> Run | None:
            found = await read(functools.partial(now.runs, key, drained=True))
            return found[0] if found else None

        def drained(self, key: RecordKey) -> bool:
            return bool(recorder.recent.drained(key))

        async def pieces(self, ids: list[int]) -> list[bytes]:
            return await find(ids)

    add_looking(router, Here(), threads)
    add_page(router)
    return router


def _safe(store: RecordStore) -> Future[None]:
    """Is done when what was changed before is safe."""
    future: Future[None] = Future()

    def done(error: Exception | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    store.when_safe(done)
    return future


def _streamed(
    runs: Iterable[Run], head: Head, sent: Callable[[int], None] = lambda size: None
) -> Response:
    async def frames() -> AsyncIterator[bytes]:
        size = 0
        # Encoded as they are sent: a slow reader costs a frame, and no frame a millisecond.
        for frame in encode_stream(runs, head):
            yield frame
            size += len(frame)
            await asyncio.sleep(0)  # a socket that takes all at once lets nobody else in
        sent(size)

    return StreamingResponse(frames(), media_type=MEDIA_TYPE)
