"""The vLLM versions that are supported, what differs between them, and the refusal outside.

What each version gives:

| vLLM | weight versions | routed experts |
| --- | --- | --- |
| 0.27 to 0.31 | a label, stamped on generations in flight when it changes | yes |
| 0.32 | per-token spans from the engine | yes |
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import InvalidVersion, Version

from recorder_core.errors import UnsupportedEngineError

OLDEST = Version("0.27.0")
NEWEST = Version("0.33.0")
"""The first release that is not supported."""


def check_version(text: str) -> Version:
    """The engine's version.

    Raises:
        UnsupportedEngineError: It is outside the supported range.
    """
    try:
        version = Version(Version(text).base_version)
    except InvalidVersion:
        raise UnsupportedEngineError(f"vLLM calls its version {text!r}, which is none") from None
    if not OLDEST <= version < NEWEST:
        raise UnsupportedEngineError(
            f"vLLM {text} cannot be recorded: this vllm-recorder supports >={OLDEST}, <{NEWEST}. "
            "Install a vLLM in that range, or a vllm-recorder for yours."
        )
    return version


@contextmanager
def refusing() -> Iterator[None]:
    """At the command line the message is the answer, not a traceback."""
    try:
        yield
    except UnsupportedEngineError as error:
        raise SystemExit(f"vllm: error: {error}") from None


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse ways of serving in which requests would go past the recorder unseen.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    import vllm.envs as envs

    count = getattr(args, "api_server_count", None)
    refusals = {
        "the Rust front end has no Python hooks: unset VLLM_USE_RUST_FRONTEND": getattr(
            envs, "VLLM_USE_RUST_FRONTEND", False
        ),
        "the gRPC server has no routes for /records: leave out --grpc": getattr(
            args, "grpc", False
        ),
        "this command serves no HTTP API: use `vllm serve`": not hasattr(args, "uvicorn_log_level"),
        "--headless serves no API: give the flag to the node that does": getattr(
            args, "headless", False
        ),
        "data parallel engines are not supported yet: start one server per replica and give the "
        "record client all their addresses": getattr(args, "data_parallel_size", 1) > 1,
        # After data parallel, which by default is so many API servers.
        f"{count} API server processes would each record only a part: use --api-server-count 1": (
            count is not None and count > 1
        ),
    }
    for message, applies in refusals.items():
        if applies:
            raise UnsupportedEngineError(f"--enable-recording: {message}")


def check_experts(model_config: Any) -> None:
    """Refuse a model that routes no tokens to experts.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    if not model_config.get_num_experts():
        raise UnsupportedEngineError(
            "--recording-routed-experts: the model has no experts; leave the flag out"
        )


def check_hook_points(output_processor: Any) -> None:
    """Check that what the hook builds on is there, before the first request needs it.

    Raises:
        UnsupportedEngineError: Naming what is missing.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

    _check_parameters(output_processor, "add_request", ["request", "prompt"])
    _check_parameters(
        RequestState,
        "make_request_output",
        ["self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"],
    )
    _check_parameters(LogprobsProcessor, "_update_sample_logprobs", ["self", "logprobs_lists"])


def _check_parameters(owner: Any, name: str, expected: list[str]) -> None:
    where = f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{name}"
    function = getattr(owner, name, None)
    if function is None:
        found = "is missing"
    else:
        parameters = list(inspect.signature(function).parameters)[: len(expected)]
        if parameters == expected:
            return
        found = f"takes {parameters}, expected {expected}"
    raise UnsupportedEngineError(
        f"vLLM's {where} {found}: this build of vLLM differs from the release that vllm-recorder "
        f"was made for. Install a released vLLM >={OLDEST}, <{NEWEST}"
    )
