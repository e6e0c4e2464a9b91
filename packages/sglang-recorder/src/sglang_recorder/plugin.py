"""The entry point `sglang.srt.plugins`: adds the flags, and the rest when asked.

SGLang loads it before arguments are parsed, in `sgl.Engine`, and in schedulers. It must be cheap
and idempotent. SGLang only logs a plugin that fails, so whatever must not fail is checked later,
where raising stops the start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from recorder_core.options import RecordingOptions, add_arguments
from recorder_core.protocol import PREFIX
from sglang_recorder import compat

_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_LAUNCH = f"{_HTTP_SERVER}._setup_and_run_http_server"
_GLOBAL_STATE = f"{_HTTP_SERVER}.set_global_state"
_AUTH = "sglang.srt.utils.auth.decide_request_auth"
ENABLE_VARIABLE = "SGLANG_ENABLE_RECORDING"
"""Records where no command line is read: in a launcher that makes its `ServerArgs` itself."""

options = RecordingOptions()
"""What this process was started with, once its arguments are read."""
_given = argparse.Namespace()
"""The arguments with --enable-recording among them, whoever parsed them."""
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
    # A launcher of others has imported the server by now; schedulers never do.
    if _enabled_by_environment() and _HTTP_SERVER in sys.modules:
        _watch_other_launchers(argparse.Namespace(enable_recording=True))


def _enabled_by_environment() -> bool:
    return os.environ.get(ENABLE_VARIABLE, "").lower() in ("1", "true")


class _Enable(argparse._StoreTrueAction):
    """As `store_true`, for launchers that parse the flag and then make their `ServerArgs` anew."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        _watch_other_launchers(namespace)
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()


def _add_flags(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    # More than one caller fills some parsers: the flags are added once.
    if not any(group.title == "Recording" for group in parser._action_groups):
        add_arguments(parser)
        parser._option_string_actions["--enable-recording"].__class__ = _Enable


def _read_flags(from_cli_args: Any, cls: type[Any], args: argparse.Namespace) -> Any:
    global options
    if _enabled_by_environment():
        args.enable_recording = True
    options = RecordingOptions.from_args(args)
    if not options.enabled:
        return from_cli_args(cls, args)
    with compat.SUPPORT.refusing():
        _check(args)
        server_args = from_cli_args(cls, args)
        _apply_hooks({_LAUNCH: _attach, _AUTH: _let_in})
    return server_args


def _check(args: argparse.Namespace) -> None:
    import sglang

    version = compat.SUPPORT.check_version(sglang.__version__)
    compat.check_arguments(args)
    compat.check_workers(args, version)
    if options.routed_experts:
        args.enable_return_routed_experts = True


def _apply_hooks(hooks: dict[str, Callable[..., Any]]) -> None:
    # Late: this imports most of SGLang.
    from sglang_recorder import hook_points

    hook_points.apply_hooks(hooks)


def _attach(launch: Any, *args: Any, **kwargs: Any) -> Any:
    # Later still: prometheus_client must be imported after SGLang has set its directory.
    from sglang_recorder import launching

    with ExitStack() as ending:
        with compat.SUPPORT.refusing():
            call = launching.attach(options, ending, launch, *args, **kwargs)
        return launch(*call.args, **call.kwargs)


def _watch_other_launchers(args: argparse.Namespace) -> None:
    """Record in a launcher that neither reads `args` again nor calls SGLang's own.

    Whatever it does, it tells SGLang's application which engine to serve.
    """
    global _given
    _given = args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _GLOBAL_STATE not in HookRegistry._hooks:
        HookRegistry.register(_GLOBAL_STATE, _take_over, HookType.AROUND)


def _take_over(set_global_state: Any, state: Any) -> Any:
    manager = state.tokenizer_manager
    if manager is not None and not options.enabled and not hasattr(manager, "_recorder_hook"):
        compat.check_engine(manager.server_args)
        _apply_hooks({_AUTH: _let_in})
        from sglang_recorder import server

        server.mount(RecordingOptions.from_args(_with_defaults(_given)), manager)
    return set_global_state(state)


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The flags that were given, and the others' defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([], argparse.Namespace(**vars(args)))


def _let_in(decide: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's decision whether a request may pass; `/records` has a guard of its own."""
    path = str(kwargs.get("path", ""))
    if path == PREFIX or path.startswith(f"{PREFIX}/"):
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return decide(*args, **kwargs)
