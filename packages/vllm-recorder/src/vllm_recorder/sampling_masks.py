"""Sampling masks: kept as vLLM sends them, a step at a time, where it was told to return them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from recorder_core.intake import Intake
from recorder_core.sampling_mask import SamplingMask


class SamplingMaskChunks(list[Any]):
    """A request's `sampling_mask_chunks`, which also keeps what vLLM clears once it is streamed.

    Args:
        recorder: Where faults are counted.
    """

    def __init__(self, recorder: Intake) -> None:
        super().__init__()
        self._recorder = recorder
        # Copies: a chunk is a view of the whole message that its step's outputs came in.
        self._token_ids = array("i")
        self._counts = array("i")

    def append(self, chunk: Any) -> None:
        """As a list's; a fault costs the record its mask, and nothing else."""
        super().append(chunk)
        try:
            token_ids = np.asarray(chunk.token_ids, np.int32)
            offsets = chunk.offsets
            counts = [len(token_ids)] if offsets is None else np.diff(offsets).tolist()
            if sum(counts) != len(token_ids):
                raise ValueError(f"{counts} ids are {sum(counts)}, not {len(token_ids)}")
            self._token_ids.frombytes(token_ids.tobytes())
            self._counts.fromlist(counts)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self._recorder.count_error("a sampling mask could not be read")

    def joined(self, count: int) -> SamplingMask:
        """What came for the first `count` tokens; what a stop string cut off is left out."""
        counts = np.array(self._counts[:count], np.int32)
        token_ids = np.array(self._token_ids[: int(counts.sum(dtype=np.int64))], np.int32)
        return SamplingMask(token_ids, counts)
