"""An engine's server without an engine, in a process of its own: streams and `/records` routes.

64 tokens come at each step, one for each client's stream, as an engine core sends them. How late
the event loop wakes up is noted all the while.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse

from benchmarks import generations
from benchmarks.baseline import baseline_encode
from recorder_core import KeyPrefix, MemoryStore, Recorder, RecordKey, assemble
from recorder_core.intake import Pending
from recorder_core.server import AdminGuard, records_router

STEP_S = 0.02
"""Between two tokens of a stream."""
_PIECE = b'data: {"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
_BEAT_S = 0.001


class Engine:
    """What the server's process holds; its methods are called from the benchmark's."""

    def __init__(self) -> None:
        self.recorder = Recorder(MemoryStore(2**40))
        self.app = FastAPI()
        self.app.include_router(records_router(self.recorder, guard=AdminGuard(None)))
        self.app.get("/stream")(self._stream)
        self.app.get("/baseline")(self._baseline)
        self._begun: list[Pending] = []
        self._latest = 0.0

    async def _stream(self) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                now = time.monotonic()
                await asyncio.sleep(STEP_S - now % STEP_S)  # all of a step at once
                yield _PIECE

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def _baseline(self) -> Response:  # on a thread
        return Response(self._blob(), media_type="application/octet-stream")

    def _blob(self) -> bytes:
        return baseline_encode(self._experiences)

    async def beat(self) -> None:
        """Note how late the event loop is."""
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_BEAT_S)
            self._latest = max(self._latest, time.perf_counter() - asked - _BEAT_S)

    def latest_s(self) -> float:
        """The longest time that the event loop was late since this was last asked."""
        latest, self._latest = self._latest, 0.0
        return latest

    def fill(self, count: int, prompt: int, response: int) -> int:
        """Store so many runs of one turn; returns the bytes that the store holds."""
        ((_, record),) = generations.recorded([generations.single(prompt, response)])[
            0
        ].records.items()
        for each in generations.copies(record, count):
            self.recorder.store.add(each)
        return self.recorder.store.stats().bytes

    def assemble(self) -> None:
        """Make the experiences that the baseline hands out."""
        self._experiences = assemble(self.recorder.store.get(KeyPrefix()))

    def clear(self) -> None:
        """Forget everything."""
        self.recorder.store.remove(KeyPrefix())

    def begin(self, count: int) -> None:
        """So many generations begin, each under a key of its own."""
        keys = (RecordKey.parse(f"waiting/{number}/0") for number in range(count))
        self._begun = [self.recorder.start(key) for key in keys]

    def end(self) -> None:
        """They end, without a token."""
        for pending in self._begun:
            pending.drop("empty")


class Served:
    """The server, as the benchmark's process reaches it.

    Args:
        pipe: To the server's process.
        pid: Of that process.
        url: Where it answers.
    """

    def __init__(self, pipe: Connection, pid: int, url: str) -> None:
        self._pipe, self.pid, self.url = pipe, pid, url

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of its `Engine`."""
        self._pipe.send((name, args))
        return self._pipe.recv()


def memory(pid: int | str = "self", *, most: bool = False) -> int:
    """Bytes that a process has in memory, or the most since `forget_most`."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = status.partition("VmHWM:" if most else "VmRSS:")[2]
    return int(line.split()[0]) * 1024


def forget_most(pid: int | str = "self") -> None:
    """Count the most memory of a process from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def serving() -> Iterator[Served]:
    """Start a server, and end it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield Served(ours, process.pid, ours.recv())
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    engine = Engine()
    # With the protocol named: asyncio sends small answers at once only then.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(4096)
        server = uvicorn.Server(uvicorn.Config(engine.app, log_level="warning"))

        def answer() -> None:
            while not server.started:
                time.sleep(0.01)
            pipe.send(f"http://127.0.0.1:{listening.getsockname()[1]}")
            while True:
                name, args = pipe.recv()
                pipe.send(getattr(engine, name)(*args))

        async def serve() -> None:
            beat = asyncio.create_task(engine.beat())
            await server.serve([listening])
            beat.cancel()

        threading.Thread(target=answer, daemon=True).start()
        asyncio.run(serve())
