"""Record what a program samples through the Tinker SDK.

Importing this package imports no SDK and patches nothing; `TinkerRecorder().instrument()` does.
"""

from recorder_core.context import record_key, skip_recording
from tinker_recorder.recorder import TinkerRecorder, with_text

__all__ = ["TinkerRecorder", "record_key", "skip_recording", "with_text"]
