"""Sequences into packs of bounded length, and packs evenly over data-parallel ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from recorder_core.errors import ExportError

Pack = list[int]
"""Indices of the sequences that are packed together, in order."""


def pack(lengths: Sequence[int], token_budget: int, *, ranks: int = 1) -> list[list[Pack]]:
    """Pack sequences into as few packs as will do, the same number for every rank.

    Ranks that take part in one step together must each have as many packs. The longest sequence
    goes first, each into the shortest pack (LPT, Graham 1969), which keeps packs and ranks even.

    Args:
        lengths: Tokens of each sequence.
        token_budget: Tokens that a pack may have.
        ranks: Data-parallel ranks.

    Returns:
        For each rank its packs; every sequence is in one of them.

    Raises:
        ExportError: A sequence is longer than the budget, or there are too few sequences to give
            every rank as many packs.
    """
    if token_budget < 1 or ranks < 1:
        raise ExportError(f"token_budget {token_budget} and ranks {ranks} must be 1 or more")
    too_long = [length for length in lengths if length > token_budget]
    if too_long:
        raise ExportError(
            f"{len(too_long)} sequences are longer than the token_budget of {token_budget}, the "
            f"longest has {max(too_long)} tokens; leave them out, or raise the budget"
        )
    count = ranks * max(1, math.ceil(sum(lengths) / token_budget / ranks))
    while count <= len(lengths):
        packs = _fit(lengths, count, token_budget)
        if packs is not None:
            return _deal(packs, lengths, ranks)
        count += ranks
    raise ExportError(
        f"{len(lengths)} sequences do not fill packs of {token_budget} tokens that {ranks} ranks "
        "can share evenly; add a sequence, leave one out, or raise the budget"
    )


def _fit(lengths: Sequence[int], count: int, token_budget: int) -> list[Pack] | None:
    """So many packs, none of them empty; None if a sequence fits in none."""
    loads = [(0, number) for number in range(count)]
    packs: list[Pack] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, number = loads[0]
        if load + lengths[index] > token_budget:
            return None
        heapq.heapreplace(loads, (load + lengths[index], number))
        packs[number].append(index)
    return [sorted(each) for each in packs]


def _deal(packs: list[Pack], lengths: Sequence[int], ranks: int) -> list[list[Pack]]:
    """As many packs for each rank, with about as many tokens."""
    totals = {number: sum(lengths[index] for index in each) for number, each in enumerate(packs)}
    dealt: list[list[Pack]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    share = len(packs) // ranks
    for number in sorted(totals, key=lambda number: -totals[number]):
        open_ranks = [rank for rank in range(ranks) if len(dealt[rank]) < share]
        rank = min(open_ranks, key=loads.__getitem__)
        dealt[rank].append(packs[number])
        loads[rank] += totals[number]
    return dealt
