"""Routed experts: from what SGLang sends to rows that say whether they were computed."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from recorder_core.records import RoutedExperts

_ITEM_BYTES = 4  # int32


def fits(experts: Any, rows: int, top_k: int) -> bool:
    """Whether SGLang sent `rows` rows, of however many layers."""
    if isinstance(experts, str):
        # Four characters are three bytes, but for padding.
        count = (len(experts) // 4 * 3 - experts[-2:].count("=")) // _ITEM_BYTES
    else:  # without a detokenizer SGLang sends the tensor itself
        count = experts.numel()
    return rows > 0 and count > 0 and count % (rows * top_k) == 0


def decode(experts: Any, rows: int, top_k: int, *, start: int, computed_from: int) -> RoutedExperts:
    """The experts of `rows` tokens from `start` of the whole sequence on.

    SGLang keeps a row for each place of its KV cache, zero until it is computed here. What came
    into the cache from elsewhere, e.g. from another tier, has a row of zeros, or on a decode server
    whatever that place held before. Of `top_k` different experts only one can be 0.

    Args:
        experts: As SGLang sends them.
        rows: How many.
        top_k: Experts per token.
        start: The row of the whole sequence that the first one is.
        computed_from: The first row of the whole sequence that this engine computed.
    """
    if isinstance(experts, str):
        data = np.frombuffer(base64.b64decode(experts), dtype=np.int32)
    else:
        data = experts.numpy()
    data = data.reshape(rows, -1, top_k)
    computed = np.asarray(data.any(axis=(1, 2))) if top_k > 1 else np.ones(rows, dtype=bool)
    computed[: max(computed_from - start, 0)] = False
    valid = None if computed.all() else _ranges(computed, start)
    return RoutedExperts(data=data, start=start, valid=valid)


def _ranges(computed: np.ndarray[Any, Any], start: int) -> tuple[tuple[int, int], ...]:
    """Where `computed` holds, as `[start, end)` of the whole sequence."""
    edges = np.flatnonzero(np.diff(computed, prepend=False, append=False)) + start
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
