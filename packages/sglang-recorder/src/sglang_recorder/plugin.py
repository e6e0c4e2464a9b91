"""The entry point `sglang.srt.plugins`: adds the flags, and the rest when asked.

SGLang loads it before arguments are parsed, in `sgl.Engine`, and in schedulers. It must be cheap
and idempotent. SGLang only logs a plugin that fails, so whatever must not fail is checked later,
where raising stops the start.
"""

from __future__ import annotations

import argparse
from typing import Any

from recorder_core.options import RecordingOptions, add_arguments
from recorder_core.protocol import PREFIX
from sglang_recorder import compat

_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_LAUNCH = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_AUTH = "sglang.srt.utils.auth.decide_request_auth"

options = RecordingOptions()
"""What this process was started with, once its arguments are read."""
_registered = False


def register() -> None:
    """Make SGLang's launchers know the recording flags."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ARGUMENTS}.add_cli_args", _add_flags, HookType.AFTER)
    HookRegistry.register(f"{_ARGUMENTS}.from_cli_args", _read_flags, HookType.AROUND)


def _add_flags(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    # More than one caller fills some parsers: the flags are added once.
    if not any(group.title == "Recording" for group in parser._action_groups):
        add_arguments(parser)


def _read_flags(from_cli_args: Any, cls: type[Any], args: argparse.Namespace) -> Any:
    global options
    options = RecordingOptions.from_args(args)
    if not options.enabled:
        return from_cli_args(cls, args)
    with compat.SUPPORT.refusing():
        _check(args)
        server_args = from_cli_args(cls, args)
        _apply_hooks()
    return server_args


def _check(args: argparse.Namespace) -> None:
    import sglang

    compat.SUPPORT.check_version(sglang.__version__)
    compat.check_arguments(args)
    if options.routed_experts:
        args.enable_return_routed_experts = True


def _apply_hooks() -> None:
    # Late: this imports most of SGLang.
    from sglang_recorder import hook

    hook.apply_hooks({_LAUNCH: _attach, _AUTH: _let_in})


def _attach(launch: Any, *args: Any, **kwargs: Any) -> Any:
    # Later still: prometheus_client must be imported after SGLang has set its directory.
    from sglang_recorder import server

    with compat.SUPPORT.refusing():
        call = server.attach(options, launch, *args, **kwargs)
    return launch(*call.args, **call.kwargs)


def _let_in(decide: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's decision whether a request may pass; `/records` has a guard of its own."""
    path = str(kwargs.get("path", ""))
    if path == PREFIX or path.startswith(f"{PREFIX}/"):
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return decide(*args, **kwargs)
