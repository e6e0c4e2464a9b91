"""Engine-native recording of rollouts for reinforcement learning: the part that knows no engine.

What is named here is imported when it is first asked for: the command says `--help` without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recorder_core.adapters import AdapterVersions
    from recorder_core.codec import (
        decode_experiences,
        decode_runs,
        encode_experiences,
        encode_runs,
    )
    from recorder_core.context import record_key, skip_recording
    from recorder_core.drops import DropReason
    from recorder_core.errors import RecorderError
    from recorder_core.experience import EID, Experience, ExperienceTurn
    from recorder_core.keys import KeyPrefix, RecordKey
    from recorder_core.recorder import Recorder, RecorderStats
    from recorder_core.records import (
        FinishReason,
        MultiModalItem,
        Record,
        RoutedExperts,
        Sampling,
        Turn,
        VersionSpan,
    )
    from recorder_core.runs import Run
    from recorder_core.sampling_mask import SamplingMask
    from recorder_core.stores import MemoryStore, RecordStore
    from recorder_core.trajectories import Forest, assemble

__all__ = [
    "EID",
    "AdapterVersions",
    "DropReason",
    "Experience",
    "ExperienceTurn",
    "FinishReason",
    "Forest",
    "KeyPrefix",
    "MemoryStore",
    "MultiModalItem",
    "Record",
    "RecordKey",
    "RecordStore",
    "Recorder",
    "RecorderError",
    "RecorderStats",
    "RoutedExperts",
    "Run",
    "Sampling",
    "SamplingMask",
    "Turn",
    "VersionSpan",
    "assemble",
    "decode_experiences",
    "decode_runs",
    "encode_experiences",
    "encode_runs",
    "record_key",
    "skip_recording",
]

_NAMES = {
    "adapters": ("AdapterVersions",),
    "codec": ("decode_experiences", "decode_runs", "encode_experiences", "encode_runs"),
    "context": ("record_key", "skip_recording"),
    "drops": ("DropReason",),
    "errors": ("RecorderError",),
    "experience": ("EID", "Experience", "ExperienceTurn"),
    "keys": ("KeyPrefix", "RecordKey"),
    "recorder": ("Recorder", "RecorderStats"),
    "records": (
        *("FinishReason", "MultiModalItem", "Record", "RoutedExperts", "Sampling", "Turn"),
        "VersionSpan",
    ),
    "runs": ("Run",),
    "sampling_mask": ("SamplingMask",),
    "stores": ("MemoryStore", "RecordStore"),
    "trajectories": ("Forest", "assemble"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
