"""The entry point `vllm.general_plugins`: adds the flags, and the endpoint plugin when asked.

vLLM loads it in every process: before arguments are parsed, in engine cores and in workers. It
must be cheap, idempotent, and must not raise, as that would end the process.
"""

from __future__ import annotations

import argparse
import functools
import logging
from typing import Any

from recorder_core.options import RecordingOptions, add_arguments
from vllm_recorder import compat

logger = logging.getLogger("vllm.recorder")

_options = RecordingOptions()
"""What this process was started with, once its arguments are read."""


def register() -> None:
    """Make `vllm serve` know the recording flags."""
    try:
        from vllm import plugins
        from vllm.engine.arg_utils import EngineArgs

        if hasattr(EngineArgs, "_recorder_registered"):
            return
        # All are made before the first takes effect: flags without the rest would be understood
        # and do nothing.
        add_cli_args = _with_flags(EngineArgs.add_cli_args)
        from_cli_args = _with_options(EngineArgs.from_cli_args.__func__)
        load_endpoint_plugins = _with_endpoints(plugins.load_endpoint_plugins)
    except (ImportError, AttributeError):
        logger.exception(
            "vllm-recorder supports vLLM >=%s, <%s; this one gets no --enable-recording",
            *[compat.OLDEST, compat.NEWEST],
        )
        return
    EngineArgs._recorder_registered = True
    EngineArgs.add_cli_args = add_cli_args
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    plugins.load_endpoint_plugins = load_endpoint_plugins


def _with_flags(add_cli_args: Any) -> Any:
    @functools.wraps(add_cli_args)
    def with_flags(parser: Any) -> Any:
        parser = add_cli_args(parser)
        # Subclasses call the base method through their own: the flags are added once a parser.
        if not any(group.title == "Recording" for group in parser._action_groups):
            add_arguments(parser)
        return parser

    return staticmethod(with_flags)


def _with_options(from_cli_args: Any) -> Any:
    @functools.wraps(from_cli_args)
    def with_options(cls: type[Any], args: argparse.Namespace) -> Any:
        global _options
        _options = RecordingOptions.from_args(args)
        if _options.enabled:
            _check(args)
            if _options.routed_experts and not args.enable_return_routed_experts:
                args.enable_return_routed_experts = True
                args.recording_hides_routed_experts = True
        engine_args = from_cli_args(cls, args)
        if _options.routed_experts:
            engine_args.create_model_config = _with_experts(engine_args.create_model_config)
        return engine_args

    return with_options


def _with_experts(create_model_config: Any) -> Any:
    # Checked before the engine core starts: of a dense model it dies, with its own traceback.
    @functools.wraps(create_model_config)
    def with_experts() -> Any:
        config = create_model_config()
        with compat.refusing():
            compat.check_experts(config)
        return config

    return with_experts


def _check(args: argparse.Namespace) -> None:
    import vllm

    with compat.refusing():
        compat.check_version(vllm.__version__)
        compat.check_arguments(args)


def _with_endpoints(load_endpoint_plugins: Any) -> Any:
    @functools.wraps(load_endpoint_plugins)
    def with_endpoints(supported_tasks: Any = None) -> list[Any]:
        loaded: list[Any] = load_endpoint_plugins(supported_tasks)
        if _options.enabled:
            # --enable-recording is the operator's consent that VLLM_PLUGINS stands for.
            from vllm_recorder.server import RecordingEndpoints

            with compat.refusing():
                loaded.append(RecordingEndpoints(_options, supported_tasks))
        return loaded

    return with_endpoints
