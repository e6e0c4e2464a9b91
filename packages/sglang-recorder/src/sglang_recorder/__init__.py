"""Record rollouts inside stock SGLang: `sglang serve M --enable-recording`, or `install(engine)`.

Importing this package does not import SGLang: its entry point is loaded in most SGLang processes.
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

    The record key of a generation is the one in force where it is started (`record_key`).
    Generations without a key are not recorded.

    Args:
        engine: An `sgl.Engine`, or a `TokenizerManager`.
        recorder: Where turns go; by default a new one over a `MemoryStore`.

    Returns:
        The records, with `RecordClient`'s methods; installing twice on one engine goes on with the
        recorder of the first time.

    Raises:
        UnsupportedEngineError: The SGLang version is not supported, or a hook was not applied.

    Example:
        >>> records = sglang_recorder.install(engine)  # doctest: +SKIP
        >>> with sglang_recorder.record_key("0/task-7/1"):
        ...     engine.generate("Hello")  # doctest: +SKIP
    """
    from recorder_core.errors import UnsupportedEngineError
    from recorder_core.local import LocalRecords
    from recorder_core.recorder import Recorder
    from sglang_recorder import hook_points

    installed = hook_points.install(engine, recorder).recorder
    if not isinstance(installed, Recorder):
        raise UnsupportedEngineError(
            "the engine's tokenizer workers share a recorder in another process; ask it by HTTP"
        )
    return LocalRecords(installed)


def uninstall(engine: Any) -> None:
    """Undo `install`: later generations are not recorded; those in flight still are."""
    from sglang_recorder import hook_points

    hook_points.uninstall(engine)
