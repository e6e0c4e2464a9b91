"""SGLang's own launcher, when its engine is up and it is about to listen."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import sglang
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter

from recorder_core.errors import UnsupportedEngineError
from recorder_core.options import RecordingOptions
from sglang_recorder import compat, server, workers
from sglang_recorder.checking import Check

logger = logging.getLogger("sglang.recorder")


def attach(
    options: RecordingOptions,
    ending: ExitStack,
    launch: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> inspect.BoundArguments:
    """Have what the server generates recorded, before SGLang's last step.

    Args:
        options: What the flags said.
        ending: Closed when that step is over.
        launch: SGLang's `_setup_and_run_http_server`.
        *args: Its arguments.
        **kwargs: Its arguments.

    Returns:
        The arguments to go on with.

    Raises:
        UnsupportedEngineError: The model cannot be recorded as asked.
    """
    call = inspect.signature(launch).bind(*args, **kwargs)
    call.apply_defaults()
    server_args = call.arguments["server_args"]
    _check_warm_up(server_args)
    manager = call.arguments["tokenizer_manager"]
    if isinstance(manager, MultiTokenizerRouter):
        ending.callback(workers.start(options, server_args).close)
        return call
    check = Check(server.mount(options, manager), http_server.app, options.secret)
    call.arguments["execute_warmup_func"] = functools.partial(
        check.after,
        call.arguments["execute_warmup_func"],
        loop=lambda: manager.event_loop,
        process=os.getpid(),
    )
    return call


def _check_warm_up(server_args: Any) -> None:
    if not server_args.skip_server_warmup:
        return
    if not compat.SUPPORT.is_tested(compat.SUPPORT.check_version(sglang.__version__)):
        raise UnsupportedEngineError(
            "--enable-recording: --skip-server-warmup also skips the check that a generation "
            "is recorded, and this SGLang is untested: leave it out, or install SGLang "
            f"{compat.SUPPORT.tested}"
        )
    logger.warning("--skip-server-warmup also skips the check that a generation is recorded")
