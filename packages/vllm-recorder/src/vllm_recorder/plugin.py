"""The entry point `vllm.general_plugins`: adds the flags, and an endpoint plugin that obeys them.

vLLM loads it in every process: before arguments are parsed, in engine cores and in workers. It
must be cheap, idempotent, and must not raise, as that would end the process.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from typing import Any

from recorder_core.errors import RecorderError
from recorder_core.options import RecordingOptions, add_arguments
from vllm_recorder import compat
from vllm_recorder.compat import FOLDER

logger = logging.getLogger("vllm.recorder")


def register() -> None:
    """Make `vllm serve` know the recording flags."""
    try:
        from vllm import plugins
        from vllm.config import SchedulerConfig
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
            "vllm-recorder is made for vLLM %s; this one gets no --enable-recording",
            compat.SUPPORT.tested,
        )
        return
    EngineArgs._recorder_registered = True
    EngineArgs.add_cli_args = add_cli_args
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    plugins.load_endpoint_plugins = load_endpoint_plugins
    if hasattr(SchedulerConfig, "get_scheduler_cls"):
        SchedulerConfig.get_scheduler_cls = _with_columns(SchedulerConfig.get_scheduler_cls)


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
        options = RecordingOptions.from_args(args)
        if not options.enabled:
            return from_cli_args(cls, args)
        _check(args)
        if options.routed_experts and not args.enable_return_routed_experts:
            args.enable_return_routed_experts = True
            args.recording_hides_routed_experts = True
        engine_args = from_cli_args(cls, args)
        if options.routed_experts:
            engine_args.create_model_config = _checked(
                engine_args.create_model_config, compat.check_experts
            )
        engine_args.create_engine_config = _checked(
            engine_args.create_engine_config, compat.check_config
        )
        if compat.front_ends(args) > 1 and not hasattr(args, FOLDER):
            engine_args.create_engine_config = _with_host(
                engine_args.create_engine_config, args, options
            )
        return engine_args

    return with_options


def _with_host(create: Any, args: argparse.Namespace, options: RecordingOptions) -> Any:
    # In the launcher, before it starts the API servers, which are given these arguments.
    @functools.wraps(create)
    def with_host(*given: Any, **kwargs: Any) -> Any:
        config = create(*given, **kwargs)
        if not hasattr(args, FOLDER):
            from recorder_core.host.process import HostProcess

            try:
                host = HostProcess(options)
            except (RecorderError, ValueError) as error:
                raise SystemExit(f"vllm: error: --enable-recording: {error}") from None
            setattr(args, FOLDER, str(host.folder.path))
        return config

    return with_host


def _checked(create: Any, check: Callable[[Any], None]) -> Any:
    # Before the engine core starts: some of what is refused it dies of, with its own traceback.
    @functools.wraps(create)
    def checked(*args: Any, **kwargs: Any) -> Any:
        config = create(*args, **kwargs)
        with compat.SUPPORT.refusing():
            check(config)
        return config

    return checked


def _with_columns(get_scheduler_cls: Any) -> Any:
    # Asked for in engine cores alone: the import of a scheduler is spared all other processes.
    @functools.wraps(get_scheduler_cls)
    def with_columns(config: Any) -> Any:
        scheduler = get_scheduler_cls(config)
        try:
            from vllm_recorder import column

            column.instrument(scheduler)
        except Exception:  # the engine comes first: it sends logprobs in its own way
            logger.exception("logprobs are not sent in columns")
        return scheduler

    return with_columns


def _check(args: argparse.Namespace) -> None:
    import vllm

    compat.share_the_log()
    with compat.SUPPORT.refusing():
        compat.SUPPORT.check_version(vllm.__version__)
        compat.check_arguments(args)


def _with_endpoints(load_endpoint_plugins: Any) -> Any:
    @functools.wraps(load_endpoint_plugins)
    def with_endpoints(supported_tasks: Any = None) -> list[Any]:
        return [*load_endpoint_plugins(supported_tasks), EndpointsWhereAsked(supported_tasks)]

    return with_endpoints


class EndpointsWhereAsked:
    """An `EndpointPlugin` of vLLM that does nothing unless the application's arguments ask for it.

    They are the only ones that every launcher has: a framework may make its engine without
    `from_cli_args`. `--enable-recording` is the operator's consent that `VLLM_PLUGINS` stands for.
    """

    name = "recorder"
    required_tasks = None

    def __init__(self, supported_tasks: Any) -> None:
        self._tasks = supported_tasks
        self._endpoints: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes and the middleware.

        Raises:
            SystemExit: This way of serving cannot be recorded.
        """
        args = app.state.args
        options = RecordingOptions.from_args(args)
        if not options.enabled:
            return
        from vllm_recorder.server import RecordingEndpoints

        _check(args)
        with compat.SUPPORT.refusing():
            self._endpoints = RecordingEndpoints(options, self._tasks, compat.shared_folder(args))
        self._endpoints.attach_router(app)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Hook the engine.

        Raises:
            SystemExit: It cannot be recorded.
        """
        if self._endpoints is not None:
            await self._endpoints.init_state(engine_client, state, args)
