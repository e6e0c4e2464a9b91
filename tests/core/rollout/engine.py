"""What a rollout needs of an engine: generations under an API key, and the real `/records`.

Its tokens are made up, for tests of what an engine adds nothing to: scheduling, time limits,
processes that die. What is served under `/records`, and stored, is the real thing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from recorder_core import FinishReason, Recorder, Turn, VersionSpan
from recorder_core.context import current_identity
from recorder_core.rollout import EngineAddress
from recorder_core.server import AdminGuard, IdentityMiddleware, records_router
from recorder_core.stores import MemoryStore

ADMIN_KEY = "admin-key-of-the-tests"
HELD = [9]
"""A prompt that is answered only when the test says so."""


class StandIn:
    """One replica on a port of this machine; it can be stopped, and started anew."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """The record key of each generation, in order."""
        self.together = 1
        """Generations wait until so many are there."""
        self.release = True
        """Whether `HELD` is answered."""
        self.clock_s = 0.0
        """Added to the store's time: what is leased can be let run out."""
        self.secret: str | None = None
        """What record keys have to be signed with; of the next start."""
        self.labels = ["7"]
        """Every label that its weights have had."""
        self._waiting = 0
        self._ids = itertools.count()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = probe.getsockname()
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self.engine = EngineAddress(base_url=self.url, model_name="stand-in", admin_key=ADMIN_KEY)

    def start(self) -> None:
        """Serve, with nothing in memory."""
        self.recorder = Recorder(MemoryStore(clock=lambda: time.monotonic() + self.clock_s))
        self.store = self.recorder.store
        app = FastAPI()
        app.include_router(
            records_router(
                self.recorder, guard=AdminGuard(ADMIN_KEY), set_version=self._set_version
            )
        )
        app.post("/v1/completions")(self._complete)
        app.add_middleware(IdentityMiddleware, secret=self.secret)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self._address)
        config = uvicorn.Config(
            app, log_level=logging.CRITICAL, lifespan="off", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        """Go away; what was in memory is lost."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self.recorder.close()

    async def _set_version(self, label: str) -> None:
        self.labels.append(label)

    async def _complete(self, request: Request) -> dict[str, Any]:
        """Sample one token after the prompt: the number of the generation."""
        body = await request.json()
        identity = current_identity()
        assert identity is not None
        if identity.key is None:
            self.recorder.count_unkeyed(identity.reason, identity.detail)
            return {"id": "unkeyed", "ids": [1]}
        self.asked.append(identity.key.text)
        pending, began = self.recorder.start(identity.key), time.time()
        self._waiting += 1
        while body["prompt"] == HELD and not self.release:
            await asyncio.sleep(0.005)
        while self._waiting < self.together:
            await asyncio.sleep(0.005)
        self.together = 1
        number = next(self._ids)
        turn = Turn(
            key=identity.key,
            prompt_ids=body["prompt"],
            response_ids=[100 + number % 100],
            logprobs=[-0.5],
            versions=[VersionSpan(0, 1, self.labels[-1])],
            finish_reason=FinishReason.STOP,
            request_id=f"cmpl-{number}",
            created_at=began,
            finished_at=time.time(),
        )
        pending.finish(turn)
        return {"id": turn.request_id, "ids": turn.response_ids}


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """A replica that serves."""
    replica = StandIn()
    replica.start()
    try:
        yield replica
    finally:
        replica.stop()
