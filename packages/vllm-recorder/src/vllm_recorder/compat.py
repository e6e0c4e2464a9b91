"""The vLLM versions that are supported, what differs between them, and the refusal outside."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from packaging.version import Version

from recorder_core.engines.refusals import refuse
from recorder_core.engines.support import EngineSupport, Gives
from recorder_core.errors import UnsupportedEngineError

SUPPORT = EngineSupport("vLLM", "vllm-recorder", Version("0.27.0"), Version("0.33.0"))

TABLE = [
    Gives("0.27 to 0.31", "the label in force, stamped when it changes", "yes"),
    Gives("0.32 to 0.33", "spans per token, from the engine", "yes"),
]
"""What each version gives; the tables of the README and the docs are checked against it."""


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse ways of serving in which requests would go past the recorder unseen.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    import vllm.envs as envs

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
        }
    )


FOLDER = "recording_folder"
"""What the launcher of several API servers adds to their arguments: where their recorder is."""


def front_ends(args: argparse.Namespace) -> int:
    """How many API servers share the engine."""
    return getattr(args, "api_server_count", None) or 1


def shared_folder(args: argparse.Namespace) -> str | None:
    """Where the recorder of several API servers is; None if this is the only one.

    Raises:
        UnsupportedEngineError: There are several, and whatever launched them started no recorder.
    """
    folder: str | None = getattr(args, FOLDER, None)
    if folder is None and front_ends(args) > 1:
        raise UnsupportedEngineError(
            f"{front_ends(args)} API servers would each record only a part, as their launcher did "
            "not start a recorder for all: use `vllm serve`, or --api-server-count 1"
        )
    return folder


LOGPROBS = {
    "raw_logprobs": "the model's own, before temperature, truncation and penalties. For importance "
    "ratios against what was sampled from, start with --logprobs-mode processed_logprobs",
    "processed_logprobs": "those of the distribution that is sampled from, after temperature, "
    "truncation and penalties",
}
"""What the recorded logprobs are, by `--logprobs-mode`."""


def check_config(config: Any) -> None:
    """Refuse an engine whose tokens are no samples, or whose logprobs are none.

    Args:
        config: The engine's `VllmConfig`.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    mode = str(config.model_config.logprobs_mode)
    kv, encoder = config.kv_transfer_config, config.ec_transfer_config
    refuse(
        {
            f"--logprobs-mode {mode} gives logits, which cannot be recorded as logprobs: use "
            "processed_logprobs or raw_logprobs": mode not in LOGPROBS,
            "a server that only prefills (kv_role kv_producer) samples a token that no client is "
            "given: give the flag to the server that decodes": kv is not None
            and kv.kv_role == "kv_producer",
            "a server that only encodes (ec_role ec_producer) samples nothing: give the flag to "
            "the server that decodes": encoder is not None and encoder.ec_role == "ec_producer",
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


def check_experts_are_returned(config: Any) -> None:
    """Refuse an engine that was made without what our flag turns on.

    Args:
        config: The engine's `VllmConfig`.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    outputs = getattr(config, "aux_output_config", config.model_config)  # its own since 0.32
    if not outputs.enable_return_routed_experts:
        raise UnsupportedEngineError(
            "--recording-routed-experts: the engine was made without it; make its arguments with "
            "AsyncEngineArgs.from_cli_args, or with enable_return_routed_experts=True"
        )


def check_hook_points(output_processor: Any) -> None:
    """Check that what the hook builds on is there, before the first request needs it.

    Raises:
        UnsupportedEngineError: Naming what is missing.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

    SUPPORT.check_parameters(output_processor, "add_request", ["request", "prompt"])
    SUPPORT.check_parameters(output_processor, "abort_requests", ["request_ids", "internal"])
    SUPPORT.check_parameters(output_processor, "propagate_error", ["e"])
    SUPPORT.check_parameters(
        RequestState,
        "_new_completion_output",
        ["self", "token_ids", "finish_reason", "stop_reason"],
    )
    SUPPORT.check_parameters(
        LogprobsProcessor, "_update_sample_logprobs", ["self", "logprobs_lists"]
    )


def share_the_log() -> None:
    """What core warns of goes where vLLM's own lines go.

    A package that vLLM imports sets the root logger to ERROR, for all that are not vLLM's.
    """
    core, engine = logging.getLogger("recorder_core"), logging.getLogger("vllm")
    core.setLevel(engine.level)
    core.propagate = engine.propagate
    for handler in engine.handlers:
        core.addHandler(handler)
