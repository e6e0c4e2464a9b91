"""Several tokenizer workers: the launcher's side, and that of each worker.

SGLang's launcher only routes messages then. uvicorn starts the workers, which load no plugin: it is
given an application of ours to import there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import http_server
from sglang.srt.environ import envs
from sglang.srt.utils import kill_process_tree
from uvicorn.importer import import_from_string

from recorder_core.errors import RecorderError, UnsupportedEngineError
from recorder_core.host.messages import Folder
from recorder_core.host.news import exchange_news
from recorder_core.host.passing import passing_router
from recorder_core.host.process import HostProcess
from recorder_core.host.relay import Relay
from recorder_core.options import RecordingOptions
from recorder_core.server import AdminGuard
from recorder_core.view.pieces import pieces_of
from sglang_recorder import hook_points, server
from sglang_recorder.checking import Check

logger = logging.getLogger("sglang.recorder")

FOLDER_VARIABLE = "SGLANG_RECORDING_FOLDER"
"""Tells the workers where their recorder is."""
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_THEIR_APP = f"{_HTTP_SERVER}:app"
_OUR_APP = "sglang_recorder.worker_app:app"
_APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
"""Tells newer releases which application uvicorn is to import in a worker."""


class Handed(NamedTuple):
    """What the launcher leaves for its workers, in the folder of their recorder."""

    options: RecordingOptions
    app: str
    """The application that would be served without recording."""
    keys: list[str]
    """SGLang's own."""

    @staticmethod
    def path(folder: Folder) -> Path:
        """Where it is."""
        return folder.path / "handed"


# In the launcher.


def start(options: RecordingOptions, server_args: Any) -> HostProcess:
    """Start the recorder of all workers, and have uvicorn import our application in each.

    Args:
        options: What the flags said.
        server_args: SGLang's `ServerArgs`.

    Raises:
        UnsupportedEngineError: The model cannot be recorded as asked, or there is no recorder.
    """
    server.check_model(options, ModelConfig.from_server_args(server_args), server_args)
    try:
        host = HostProcess(options)
    except (RecorderError, ValueError) as error:
        raise UnsupportedEngineError(f"--enable-recording: {error}") from None
    guarded = options.model_copy(
        update={"admin_key": options.admin_key or server_args.admin_api_key}
    )
    handed = Handed(guarded, _serve_ours(), server.engine_keys(server_args))
    Handed.path(host.folder).write_bytes(pickle.dumps(handed))
    os.environ[FOLDER_VARIABLE] = str(host.folder.path)
    return host


def _serve_ours() -> str:
    """Have uvicorn import our application; returns the one that it would have imported."""
    if hasattr(envs, _APP_VARIABLE):
        theirs = str(getattr(envs, _APP_VARIABLE).get())
        os.environ[_APP_VARIABLE] = _OUR_APP
        return theirs
    hook_points.apply_hooks({"uvicorn.run": _run})
    return _THEIR_APP


def _run(run: Any, app: Any, *args: Any, **kwargs: Any) -> Any:
    return run(_OUR_APP if app == _THEIR_APP else app, *args, **kwargs)


# In each worker.


class Worker:
    """The recording of one tokenizer worker.

    Args:
        folder: Where the recorder of all workers is.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        handed: Handed = pickle.loads(Handed.path(folder).read_bytes())  # noqa: S301 - the launcher's own
        self._options = handed.options
        self._guard = AdminGuard(self._options.admin_key)
        self._relay = Relay(folder, aborted=self._options.aborted)
        self.app: FastAPI = import_from_string(handed.app)
        """The application to serve."""
        server.wrap(self.app, self._guard, handed.keys, self._options.secret)

        def take_over(set_global_state: Any, state: Any) -> Any:
            with _or_the_server_ends():
                self._record(state.tokenizer_manager)
            return set_global_state(state)

        def wait_and_warm_up(original: Any, *args: Any, **kwargs: Any) -> Any:
            own = kwargs.get("execute_warmup_func", http_server._execute_server_warmup)
            kwargs["execute_warmup_func"] = functools.partial(self._warm_up, own)
            return original(*args, **kwargs)

        hook_points.apply_hooks(
            {
                f"{_HTTP_SERVER}.set_global_state": take_over,
                f"{_HTTP_SERVER}._wait_and_warmup": wait_and_warm_up,
            }
        )

    def _record(self, manager: Any) -> None:
        """Hook this worker's tokenizer manager, on its event loop."""
        relay = self._relay
        self._loop = asyncio.get_running_loop()
        self._installed = hook_points.install(
            manager, relay, routed_experts=self._options.routed_experts
        )
        self._installed.tell = exchange_news(relay, self._installed.hear)
        router = passing_router(
            self._folder,
            guard=self._guard,
            set_version=self._installed.set_version,
            pieces=lambda ids: pieces_of(manager.tokenizer, ids),
            count_error=relay.count_error,
        )
        server.add_routes(self.app, router)
        server.say_what_is_recorded(self._installed, self._guard)

    def _warm_up(self, own: Any, server_args: Any) -> Any:
        check = Check(self._installed, self.app, self._options.secret)
        return check.after(own, server_args, loop=lambda: self._loop, process=os.getppid())


@contextmanager
def _or_the_server_ends() -> Iterator[None]:
    """Uvicorn starts a worker that fails again and again: with recording asked for, all ends."""
    try:
        yield
    except Exception:
        logger.exception("--enable-recording: a tokenizer worker cannot record; the server ends")
        kill_process_tree(os.getppid())
        raise


def application() -> FastAPI:
    """SGLang's application, recorded: in a worker."""
    with _or_the_server_ends():
        return Worker(Folder(Path(os.environ[FOLDER_VARIABLE]))).app
