"""Engine-native recording of rollouts for reinforcement learning: the part that knows no engine."""

from recorder_core.codec import (
    decode_experiences,
    decode_records,
    encode_experiences,
    encode_records,
)
from recorder_core.context import record_key, skip_recording
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
from recorder_core.stores import MemoryStore, RecordStore
from recorder_core.trajectories import Forest, ParentIndex, assemble

__all__ = [
    "EID",
    "Experience",
    "ExperienceTurn",
    "FinishReason",
    "Forest",
    "KeyPrefix",
    "MemoryStore",
    "MultiModalItem",
    "ParentIndex",
    "Record",
    "RecordKey",
    "RecordStore",
    "Recorder",
    "RecorderError",
    "RecorderStats",
    "RoutedExperts",
    "Sampling",
    "Turn",
    "VersionSpan",
    "assemble",
    "decode_experiences",
    "decode_records",
    "encode_experiences",
    "encode_records",
    "record_key",
    "skip_recording",
]
