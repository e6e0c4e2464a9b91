"""Real HTTP servers with `/records`, and ways to ask them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import threading
import time
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from recorder_core import FinishReason, RecordKey, Turn
from recorder_core.client import AsyncRecordClient
from recorder_core.recent import DEFAULT_RECENT_BYTES, Recent
from recorder_core.recorder import Recorder
from recorder_core.server import AdminGuard, IdentityMiddleware, records_router
from recorder_core.stores import MemoryStore

ADMIN_KEY = "s3cret-admin"


KEY = RecordKey.parse("0/task/0")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class RecordingServer:
    """An application with `/records`, its recorder, and what it was asked."""

    def __init__(self, *, set_version=None, recent=None):
        self.clock = Clock()
        self.recorder = Recorder(MemoryStore(clock=self.clock, recent=recent))
        self.store = self.recorder.store
        self.version = None

        async def take_version(version):
            self.version = version

        self.app = FastAPI()
        self.app.include_router(
            records_router(
                self.recorder,
                guard=AdminGuard(ADMIN_KEY),
                set_version=take_version if set_version is None else None,
            )
        )
        self.app.add_middleware(IdentityMiddleware)

    def submit(self, key, prompt_ids, response_ids, **fields):
        fields = {"finish_reason": FinishReason.STOP, "finished_at": time.time(), **fields}
        fields.setdefault("created_at", fields["finished_at"])
        self.recorder.submit(
            Turn(
                key=key,
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                logprobs=[-0.5] * len(response_ids),
                **fields,
            )
        )


@contextmanager
def serving(app):
    """The application on a port of this machine; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level=logging.CRITICAL, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


class Host:
    """A port of this machine that answers for one application after another."""

    def __init__(self):
        self.app = None

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)

    @contextmanager
    def recording(self):
        server = RecordingServer(recent=Recent(DEFAULT_RECENT_BYTES))
        server.url, self.app = self.url, server.app
        yield server
        server.recorder.close()


def unused_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


class Awaited:
    """An `AsyncRecordClient` with the surface of a `RecordClient`, so that tests fit both."""

    def __init__(self, *args, **kwargs):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncRecordClient(*args, **kwargs)

    def __getattr__(self, name):
        value = getattr(self._client, name)
        if name == "drain":
            return lambda *args, **kwargs: self._drain(value(*args, **kwargs))
        if not inspect.iscoroutinefunction(value):
            return value
        return lambda *args, **kwargs: self._loop.run_until_complete(value(*args, **kwargs))

    @contextmanager
    def _drain(self, draining):
        drained = self._loop.run_until_complete(draining.__aenter__())
        try:
            yield drained
        except BaseException as error:
            kind, trace = type(error), error.__traceback__
            if not self._loop.run_until_complete(draining.__aexit__(kind, error, trace)):
                raise
        else:
            self._loop.run_until_complete(draining.__aexit__(None, None, None))

    def __repr__(self):
        return repr(self._client)

    def close(self):
        self._loop.run_until_complete(self._client.close())
        self._loop.run_until_complete(self._client._http.aclose())
        self._loop.close()
