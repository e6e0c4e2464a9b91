"""The vLLM versions that are supported, what differs between them, and the refusal outside."""

from __future__ import annotations

import argparse
from typing import Any

from packaging.version import Version

from recorder_core.engines import EngineSupport, Gives, refuse
from recorder_core.errors import UnsupportedEngineError

OLDEST = Version("0.27.0")
NEWEST = Version("0.33.0")
"""The first release that is not supported."""


TABLE = [
    Gives("0.27 to 0.31", "the label in force, stamped when it changes", "yes"),
    Gives("0.32", "spans per token, from the engine", "yes"),
]
"""What each version gives; the tables of the README and the docs are checked against it."""

SUPPORT = EngineSupport("vLLM", "vllm-recorder", OLDEST, NEWEST)
check_version = SUPPORT.check_version
refusing = SUPPORT.refusing


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse ways of serving in which requests would go past the recorder unseen.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    import vllm.envs as envs

    count = getattr(args, "api_server_count", None)
    refuse(
        {
            "the Rust front end has no Python hooks: unset VLLM_USE_RUST_FRONTEND": getattr(
                envs, "VLLM_USE_RUST_FRONTEND", False
            ),
            "the gRPC server has no routes for /records: leave out --grpc": getattr(
                args, "grpc", False
            ),
            "this command serves no HTTP API: use `vllm serve`": not hasattr(
                args, "uvicorn_log_level"
            ),
            "--headless serves no API: give the flag to the node that does": getattr(
                args, "headless", False
            ),
            "data parallel engines are not supported yet: start one server per replica and give "
            "the record client all their addresses": getattr(args, "data_parallel_size", 1) > 1,
            # After data parallel, which by default is so many API servers.
            f"{count} API server processes would each record only a part: use --api-server-count "
            "1": count is not None and count > 1,
        }
    )


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

    SUPPORT.check_parameters(output_processor, "add_request", ["request", "prompt"])
    SUPPORT.check_parameters(
        RequestState,
        "make_request_output",
        ["self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"],
    )
    SUPPORT.check_parameters(
        LogprobsProcessor, "_update_sample_logprobs", ["self", "logprobs_lists"]
    )
