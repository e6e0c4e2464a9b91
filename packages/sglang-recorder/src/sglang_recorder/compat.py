"""The SGLang versions that are supported, what differs between them, and the refusal outside."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from recorder_core.engines.refusals import refuse
from recorder_core.engines.support import EngineSupport, Gives
from recorder_core.errors import UnsupportedEngineError

SUPPORT = EngineSupport("SGLang", "sglang-recorder", Version("0.5.11"), Version("0.5.23"))
SPANS_SINCE = Version("0.5.19")
"""The first release whose scheduler reports which weights sampled each token."""
WORKERS_SINCE = Version("0.5.19")
"""The first release in which no tokenizer worker changes the weights' label, or pauses, alone."""

HOOKS = {
    "_send_one_request": ["self", "tokenized_obj"],
    "_send_batch_request": ["self", "tokenized_objs"],
    "_handle_batch_output": ["self", "recv_obj"],
    "_handle_abort_req": ["self", "recv_obj"],
    "generate_request": ["self", "obj", "request"],
    "pause_generation": ["self", "obj"],
    "continue_generation": ["self", "obj"],
    "flush_cache": ["self"],
    "unload_lora_adapter": ["self", "obj"],
    "update_weights_from_disk": ["self", "obj"],
    "update_weights_from_distributed": ["self", "obj"],
    "update_weights_from_tensor": ["self", "obj"],
    "update_weights_from_ipc": ["self", "obj"],
}
"""The methods of SGLang's TokenizerManager that are hooked, and their first parameters."""


TABLE = [
    Gives(f"{SUPPORT.oldest} to 0.5.18", "the label in force, stamped when it changes", "yes"),
    Gives(f"{SPANS_SINCE} to {SUPPORT.newest_tested}", "spans per token, from the engine", "yes"),
]
"""What each version gives; the tables of the README and the docs are checked against it."""


def reports_spans(version: Version) -> bool:
    """Whether the scheduler says which weights sampled each token."""
    return version >= SPANS_SINCE


def check_engine(server_args: Any, *, shared: bool = False) -> None:
    """Refuse engines that generate where the recorder does not see it.

    Args:
        server_args: An engine's `ServerArgs`, or the launcher's arguments.
        shared: Whether all tokenizer workers have one recorder.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    workers = getattr(server_args, "tokenizer_worker_num", None) or 1
    mode = getattr(server_args, "disaggregation_mode", None)
    refuse(
        {
            f"{workers} tokenizer workers would each record only a part, as their launcher did not "
            "start a recorder for all: use `sglang serve`, or --tokenizer-worker-num 1": workers > 1
            and not shared,
            "a prefill server does not see what is generated: give the flag to the decode "
            "server": mode == "prefill",
        }
    )


def check_workers(args: argparse.Namespace, version: Version) -> None:
    """Refuse several tokenizer workers that do not know of each other's control requests.

    Args:
        args: The launcher's.
        version: SGLang's.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    workers = getattr(args, "tokenizer_worker_num", None) or 1
    if workers > 1 and version < WORKERS_SINCE:
        raise UnsupportedEngineError(
            f"--enable-recording: {workers} tokenizer workers are recorded from SGLang "
            f"{WORKERS_SINCE} on; before, a label that one is told stays unknown to the others: "
            f"install SGLang {WORKERS_SINCE} or newer, or use --tokenizer-worker-num 1"
        )


def check_arguments(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse ways of serving in which requests would go past the recorder unseen.

    Args:
        args: The launcher's, as they were given: an engine fills others in.
        environ: The environment.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    check_engine(args, shared=True)

    def given(name: str) -> Any:
        return getattr(args, name, None)

    def on(name: str) -> bool:
        return environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")

    rust = on("SGLANG_RUST_SERVER")
    grpc = any(given(name) for name in ("grpc_mode", "smg_grpc_mode", "grpc_port"))
    grpc = grpc or on("SGLANG_ENABLE_GRPC") or bool(environ.get("SGLANG_GRPC_PORT"))
    refuse(
        {
            "the Rust server has no Python hooks: unset SGLANG_RUST_SERVER": rust,
            "the gRPC servers have no record keys and no routes for /records: leave out "
            "--grpc-mode, --smg-grpc-mode and --grpc-port, and unset SGLANG_ENABLE_GRPC and "
            "SGLANG_GRPC_PORT": grpc,
            "an encoder generates nothing: give the flag to the language server, not to one with "
            "--encoder-only": bool(given("encoder_only")),
            "an embedding model generates nothing: leave out --is-embedding or the flag": bool(
                given("is_embedding")
            ),
            "HTTP/2 is served by processes of its own in some releases: leave out "
            "--enable-http2": bool(given("enable_http2")),
            "only the first node serves an API: give the flag to --node-rank 0": bool(
                given("node_rank")
            ),
            "diffusion language models do not give logprobs: leave out --dllm-algorithm": bool(
                given("dllm_algorithm")
            ),
        }
    )
