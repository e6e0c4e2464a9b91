"""Record rollouts inside stock vLLM: `vllm serve MODEL --enable-recording`, or `install(engine)`.

Importing this package does not import vLLM: its entry point is loaded in every vLLM process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recorder_core.context import record_key, skip_recording

if TYPE_CHECKING:
    from recorder_core.local import LocalRecords
    from recorder_core.recorder import Recorder

__all__ = ["install", "record_key", "skip_recording", "uninstall"]


def install(engine: Any, recorder: Recorder | None = None) -> LocalRecords:
    """Record what an engine in this process generates.

    The record key of a generation is the one in force where it is started (`record_key`), else
    `extra_args={"record_key": "<batch>/<task>/<run>"}` of its sampling parameters. Generations
    without a key are not recorded.

    Args:
        engine: An `LLM`, `LLMEngine` or `AsyncLLM`.
        recorder: Where turns go; by default a new one over a `MemoryStore`.

    Returns:
        The records, with `RecordClient`'s methods; installing twice on one engine goes on with the
        recorder of the first time.

    Raises:
        UnsupportedEngineError: The vLLM version is not supported, or the engine has no output
            processor in this process.

    Example:
        >>> records = vllm_recorder.install(llm)  # doctest: +SKIP
        >>> with vllm_recorder.record_key("0/task-7/1"):
        ...     llm.generate("Hello")  # doctest: +SKIP
    """
    from recorder_core.errors import UnsupportedEngineError
    from recorder_core.local import LocalRecords
    from recorder_core.recorder import Recorder
    from vllm_recorder import hook

    installed = hook.install(engine, recorder).recorder
    if not isinstance(installed, Recorder):
        raise UnsupportedEngineError(
            "the engine's front ends share a recorder in another process; ask it by HTTP"
        )
    return LocalRecords(installed)


def uninstall(engine: Any) -> None:
    """Undo `install`: later generations are not recorded; those in flight still are."""
    from vllm_recorder import hook

    hook.uninstall(engine)
