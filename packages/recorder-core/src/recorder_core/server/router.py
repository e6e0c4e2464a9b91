"""The `/records` routes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from recorder_core.codec import MEDIA_TYPE, decode_records, encode_records
from recorder_core.errors import (
    CodecError,
    InvalidKeyError,
    LeaseError,
    MissingParentError,
    StoreClosedError,
)
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import (
    LEASE_HEADER,
    PENDING_HEADER,
    PREFIX,
    AckRequest,
    BlockRequest,
    CountReply,
    DrainRequest,
    FlushReply,
    KeyReply,
    StatsReply,
    SweepRequest,
    UpdateReply,
    UpdateRequest,
    VersionRequest,
)
from recorder_core.recorder import Recorder
from recorder_core.stores import KeySummary
from recorder_core.trajectories import assemble

Result = TypeVar("Result")

# Encoding a large drain takes a while: it must neither hold up the event loop nor fill the
# thread pool that the engine's own handlers use.
_THREADS = 2
_FLUSH_TIMEOUT_S = 30.0
_POLL_S = 0.02
_MESSAGE_LIMIT = 2_000
_BLOB: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
_PREFIX_QUERY = Query(description="Leading components of record keys; empty for all.")
_KEY_QUERY = Query(description="A record key, <batch>/<task>/<run>.")


def records_router(
    recorder: Recorder,
    *,
    guard: Callable[[Request], None],
    set_version: Callable[[str], Awaitable[None]] | None = None,
) -> APIRouter:
    """The routes through which workflows and schedulers reach an engine's records.

    Args:
        recorder: Whose store is served.
        guard: Called with each request before its body is read; raises HTTPException.
        set_version: Tells the engine the label of its weights; None if it has none to set.
    """
    router = APIRouter(prefix=PREFIX, tags=["records"], route_class=_guarded(guard))
    store = recorder.store
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="records")

    async def run(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Do store work on a thread, after everything that has finished so far is stored."""

        def work() -> Result:
            recorder.flush(_FLUSH_TIMEOUT_S)
            return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def settled(prefix: KeyPrefix, wait_s: float) -> None:
        """Wait until nothing under the prefix is in flight."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and recorder.pending(prefix):
            await asyncio.sleep(_POLL_S)

    @router.get("/keys")
    async def list_keys(prefix: str = _PREFIX_QUERY) -> list[KeyReply]:
        """What is recorded and what is in flight, key by key."""
        wanted = KeyPrefix(prefix)
        # Pending first: what finishes in between then shows twice rather than nowhere.
        pending = recorder.pending_by_key(wanted)
        return _key_replies(await run(store.keys, wanted), pending)

    @router.get("", responses=_BLOB, response_model=None)
    async def get_records(
        request: Request, prefix: str = _PREFIX_QUERY
    ) -> Response | list[Experience]:
        """The records under a prefix; assembled, as JSON, where the client asks for JSON."""
        wanted = KeyPrefix(prefix)
        if "application/json" in request.headers.get("accept", ""):
            text = await run(lambda: _as_json(assemble(store.get(wanted))))
            return Response(text, media_type="application/json")
        blob = await run(lambda: encode_records(store.get(wanted)))
        return Response(blob, media_type=MEDIA_TYPE)

    @router.patch("")
    async def update(body: UpdateRequest) -> UpdateReply:
        """Write a reward or info, to all that a key has now or to some of its records."""
        updated = await run(
            store.update,
            body.key,
            record_ids=body.record_ids,
            reward=body.reward,
            info=body.info,
            token_level_reward=body.token_level_reward,
        )
        return UpdateReply(updated=updated)

    @router.put("", openapi_extra={"requestBody": {"content": _BLOB[200]["content"]}})
    async def overwrite(request: Request, key: str = _KEY_QUERY) -> CountReply:
        """Replace all that a key has by the records in the body."""
        blob = await request.body()

        def put() -> int:
            # Written and read once more: what goes in can be drained, assembled and shown, and
            # holds on to no byte of the body that is not a record's.
            records = decode_records(encode_records(decode_records(blob)))
            _as_json(assemble(records))
            wanted = RecordKey.parse(key)
            recorder.forget(wanted)
            recorder.flush(_FLUSH_TIMEOUT_S)
            store.overwrite(wanted, records)
            return len(records)

        return CountReply(records=await run(put))

    @router.delete("")
    async def delete(prefix: str = _PREFIX_QUERY) -> CountReply:
        """Delete the records under a prefix, leased ones included."""
        return CountReply(records=await run(store.remove, KeyPrefix(prefix)))

    @router.post("/drain", responses=_BLOB)
    async def drain(body: DrainRequest) -> Response:
        """Hand the records under a prefix out; they come back unless acknowledged in time."""
        prefix = KeyPrefix(body.prefix)
        await settled(prefix, body.wait_s)

        def take() -> tuple[str, int, bytes]:
            # Counted before the records are taken: what finishes in between is reported too often
            # rather than not at all.
            pending = recorder.pending(prefix)
            lease = store.drain(prefix, body.lease_s)
            return lease.id, pending, encode_records(lease.records)

        lease_id, pending, blob = await run(take)
        headers = {LEASE_HEADER: lease_id, PENDING_HEADER: str(pending)}
        return Response(blob, media_type=MEDIA_TYPE, headers=headers)

    @router.post("/ack")
    async def ack(body: AckRequest) -> CountReply:
        """The drained records are safe with the caller: forget them."""
        return CountReply(records=await run(store.ack, body.lease))

    @router.post("/block", status_code=204, response_model=None)
    async def block(body: BlockRequest) -> None:
        """Refuse records under a prefix from now on; what is there stays."""
        await run(store.block, KeyPrefix(body.prefix))

    @router.post("/sweep")
    async def sweep(body: SweepRequest) -> CountReply:
        """Delete keys that nothing was added to for so long."""
        return CountReply(records=await run(store.sweep, body.older_than_s))

    @router.post("/version", status_code=204, response_model=None)
    async def version(body: VersionRequest) -> None:
        """The label of the weights, for trainers that push weights by a call of their own."""
        if set_version is None:
            raise HTTPException(501, "this engine has no weight-version label to set")
        await set_version(body.version)

    @router.post("/flush")
    async def flush() -> FlushReply:
        """Wait until everything that has finished is stored."""
        return FlushReply(flushed=await run(recorder.flush, _FLUSH_TIMEOUT_S))

    @router.get("/stats")
    async def stats() -> StatsReply:
        """Counters of the recorder and of its store."""
        return await run(lambda: StatsReply(recorder=recorder.stats(), store=store.stats()))

    return router


def _key_replies(held: list[KeySummary], pending: dict[RecordKey, int]) -> list[KeyReply]:
    replies = {each.key: KeyReply(**dict(each), pending=pending.pop(each.key, 0)) for each in held}
    for key, count in pending.items():
        replies[key] = KeyReply(key=key, records=0, rewarded=0, pending=count, bytes=0, age_s=0)
    return [replies[key] for key in sorted(replies)]


def _as_json(experiences: list[Experience]) -> str:
    return "[" + ",".join(each.model_dump_json() for each in experiences) + "]"


_STATUS: dict[type[Exception], int] = {
    InvalidKeyError: 400,
    CodecError: 400,
    LeaseError: 404,
    MissingParentError: 409,
    StoreClosedError: 503,
    ValueError: 400,
}


def _explain(error: RequestValidationError) -> str:
    # Not the framework's own reply: it repeats the input, which JSON cannot always express.
    problems = ((each["loc"], each["msg"]) for each in error.errors())
    return "; ".join(f"{'.'.join(map(str, where))}: {what}" for where, what in problems)


def _printable(text: str) -> str:
    return text[:_MESSAGE_LIMIT].encode(errors="backslashreplace").decode()


def _guarded(guard: Callable[[Request], None]) -> type[APIRoute]:
    """A route that asks the guard before it reads a body, and answers our errors as HTTP."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handler = super().get_route_handler()

            @functools.wraps(handler)
            async def guarded(request: Request) -> Response:
                guard(request)
                try:
                    response: Response = await handler(request)
                except RequestValidationError as error:
                    raise HTTPException(422, _printable(_explain(error))) from error
                except tuple(_STATUS) as error:
                    status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
                    raise HTTPException(status, _printable(str(error))) from error
                return response

            return guarded

    return GuardedRoute
