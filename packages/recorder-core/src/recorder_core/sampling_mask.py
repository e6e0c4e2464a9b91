"""Sampling masks: what truncation left of the vocabulary when each token was drawn.

A trainer that takes its softmax over the same token ids has the distribution that was sampled from
("Keep Sampling Mask" in DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr

from recorder_core.arrays import Int32Array, equal, int32

# Of the struct and its two arrays, by `sys.getsizeof`.
_OBJECT_BYTES = 256


class SamplingMask(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The token ids that top-k, top-p, min-p and bans left, for each response token.

    Those of token `i` are the `counts[i]` ids after the first `counts[:i].sum()`. A token that was
    drawn is among its own ids, so a count of 0 says that none were given: nobody sampled the token,
    or the engine did not tell.

    Raises:
        ValueError: A count is negative, or they do not add up to the ids.
    """

    token_ids: np.ndarray[Any, Any]
    """The ids of all tokens, end to end: int32 [sum of counts]."""
    counts: np.ndarray[Any, Any]
    """How many ids each token has: int32 [response tokens]."""

    def __post_init__(self) -> None:
        force_setattr(self, "token_ids", int32(self.token_ids, "sampling_mask.token_ids"))
        force_setattr(self, "counts", int32(self.counts, "sampling_mask.counts"))
        if self.counts.min(initial=0) < 0:
            raise ValueError(f"sampling_mask has a count of {self.counts.min()}, below 0")
        total = int(self.counts.sum(dtype=np.int64))
        if total != len(self.token_ids):
            raise ValueError(
                f"sampling_mask has {len(self.token_ids)} token ids, its counts add up to {total}"
            )

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each token's ids begin, and the last one's end: int64 [response tokens + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @property
    def nbytes(self) -> int:
        """Memory that it holds, in bytes."""
        return _OBJECT_BYTES + self.token_ids.nbytes + self.counts.nbytes

    def of_token(self, index: int) -> Int32Array:
        """The ids of one response token: int32 [counts[index]]."""
        begin = int(self.counts[:index].sum(dtype=np.int64))
        return self.token_ids[begin : begin + int(self.counts[index])]

    def tolist(self) -> list[list[int]]:
        """The ids of each response token, as lists."""
        ends, ids = self.offsets.tolist(), self.token_ids.tolist()
        return [ids[begin:end] for begin, end in itertools.pairwise(ends)]

    def cut(self, start: int, end: int) -> SamplingMask:
        """Only the response tokens `[start, end)`; shares memory."""
        begin, stop = self.offsets[[start, end]].tolist()
        return SamplingMask(self.token_ids[begin:stop], self.counts[start:end])

    @classmethod
    def placed(cls, parts: Sequence[tuple[int, SamplingMask]], count: int) -> SamplingMask:
        """Join masks into one over `count` tokens; those in between have no ids.

        Args:
            parts: Masks, and where the first token of each stands; in order, not overlapping.
            count: Tokens of the whole.
        """
        counts = np.zeros(count, np.int32)
        for start, part in parts:
            counts[start : start + len(part.counts)] = part.counts
        return cls(np.concatenate([part.token_ids for _, part in parts]), counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return equal(self.token_ids, other.token_ids) and equal(self.counts, other.counts)

    __hash__ = object.__hash__
