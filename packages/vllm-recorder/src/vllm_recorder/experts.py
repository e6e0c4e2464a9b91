"""Routed experts: from the chunks that vLLM sends to rows that say whether they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recorder_core.records import RoutedExperts


def join(chunks: Sequence[Any], *, start: int, rows: int, ended: bool) -> RoutedExperts:
    """The experts of the tokens from `start` of the whole sequence on.

    vLLM keeps a row for each place of its KV cache, zero until it is computed: what came into the
    cache from elsewhere has rows of zeros. Of several different experts only one can be 0.

    Args:
        chunks: As vLLM sent them: each [rows, layers, top_k].
        start: The row of the whole sequence that the first one is.
        rows: How many there should be; more belong to what a stop string cut off.
        ended: Whether the engine ended the generation itself, so that none is still to come: which
            tokens fewer rows belong to is then not known.
    """
    data = np.concatenate(chunks, axis=0)[: max(rows, 0)]
    several = data.shape[-1] > 1
    computed = np.asarray(data.any(axis=(1, 2))) if several else np.ones(len(data), dtype=bool)
    if ended and len(data) < rows:
        computed[:] = False
    valid = None if computed.all() else _ranges(computed, start)
    return RoutedExperts(data=data, start=start, valid=valid)


def _ranges(computed: np.ndarray[Any, Any], start: int) -> tuple[tuple[int, int], ...]:
    """Where `computed` holds, as `[start, end)` of the whole sequence."""
    edges = np.flatnonzero(np.diff(computed, prepend=False, append=False)) + start
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
