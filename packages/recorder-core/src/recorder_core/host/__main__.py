"""The recorder process: `python -m recorder_core.host FOLDER`, which only `HostProcess` calls."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from recorder_core.host.front_ends import HostRecorder
from recorder_core.host.messages import Folder
from recorder_core.options import RecordingOptions, make_store, say_what_is_left
from recorder_core.recent import Recent
from recorder_core.server import RecorderCollector, records_router

_GRACE_S = 5
_LOOK_S = 0.5


def main(folder: Folder) -> None:
    """Serve until the launcher ends."""
    # Sent to all processes of the launcher's group: the records are told of when it is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s [recorder] %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    launcher = os.getppid()
    options: RecordingOptions = pickle.load(sys.stdin.buffer)  # noqa: S301 - the launcher's own
    store = make_store(options.store, options.max_bytes, Recent(options.recent_bytes))
    for name in (folder.turns, folder.http):
        Path(name).unlink(missing_ok=True)  # of one that was killed
    recorder = HostRecorder(folder, store=store, adapter_versions=options.adapter_versions)
    server = uvicorn.Server(
        uvicorn.Config(
            application(recorder),
            uds=folder.http,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # older releases

    def end_when_told() -> None:
        sys.stdin.buffer.read(1)
        server.should_exit = True

    def end_with_the_launcher() -> None:
        # Its end alone does not close our input, which processes that it forked hold open too.
        while os.getppid() == launcher:
            time.sleep(_LOOK_S)
        server.should_exit = True

    for work in (end_when_told, end_with_the_launcher):
        threading.Thread(target=work, daemon=True).start()
    asyncio.run(server._serve())  # `serve` would take the signals
    say_what_is_left(recorder, options.store)


def application(recorder: HostRecorder) -> FastAPI:
    """`/records`, for front ends: they ask who may use it, and know the engine."""
    app = FastAPI(openapi_url=None)
    registry = CollectorRegistry()
    registry.register(RecorderCollector(recorder))

    @app.get("/records/metrics")
    def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.include_router(records_router(recorder, guard=lambda request: None))
    return app


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("recorder_core.host is started by an engine's launcher, with its folder")
    main(Folder(Path(sys.argv[1])))
