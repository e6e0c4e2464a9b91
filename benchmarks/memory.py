"""Bytes that the store holds per token, by tracemalloc, against what the store says itself.

Ids, logprobs, texts, request ids and all Python objects count; routed experts are not recorded.
The targets are the project's; of each ids take 4 bytes a token and logprobs 4 a sampled one. What
the texts take is part of the figure.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks import generations
from benchmarks.harness import Row, main, progress, row
from recorder_core import KeyPrefix, MemoryStore, Recorder, Turn

TARGETS = {"64 + 64 tokens": 17.0, "512 + 512 tokens": 11.0}
"""Bytes per token, texts included."""


class Held(NamedTuple):
    """Memory that some turns leave behind, in bytes."""

    store: int
    index: int
    """What the recorder remembers beside the store, to find parents."""
    recent: int
    """What the page is told of generations, of the latest 10,000."""
    stated: int
    """The store's own accounting."""
    arrays: int
    """Ids and logprobs alone."""
    texts: int
    """Prompts and responses as texts alone, a byte for each of their ASCII characters."""
    tokens: int
    """Tokens that the engine saw and sampled, each once."""
    records: int


def held(turns: Iterable[Turn]) -> Held:
    """Record turns, and see what is left."""
    tracemalloc.start()
    try:
        empty = _traced()
        store = MemoryStore(max_bytes=2**40)
        recorder = Recorder(store)
        for turn in turns:
            recorder.submit(turn)
            # One at a time: a waiting turn is no memory of the store's.
            recorder.flush()
        turn = None
        with_index = _traced() - empty
        assert recorder.stats().recorded == recorder.stats().started
        recorder.close()
        # The store asks the recorder what is in flight, and so holds it.
        store.watch(lambda key: 0)
        del recorder
        with_recent = _traced() - empty
        store.recent._generations.clear()
        without = _traced() - empty
    finally:
        tracemalloc.stop()
    records = [each for run in store.get(KeyPrefix()) for each in run.records.values()]
    arrays = [(each.prompt_ids, each.response_ids, each.logprobs) for each in records]
    texts = [text for each in records for text in (each.prompt_text, each.response_text) if text]
    return Held(
        store=without,
        index=with_index - with_recent,
        recent=with_recent - without,
        stated=store.stats().bytes,
        arrays=sum(array.nbytes for each in arrays for array in each if array is not None),
        texts=sum(map(len, texts)),
        tokens=sum(len(each.prompt_ids) + len(each.response_ids) for each in records),
        records=len(records),
    )


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def measure(quick: bool) -> list[Row]:
    runs = 2 if quick else 20

    def singles(size: int) -> Callable[[], Iterable[Turn]]:
        return lambda: (generations.single(size, size) for _ in range(10 * runs))

    def conversations() -> Iterable[Turn]:
        for _ in range(runs):
            yield from generations.conversation(turns=20, first=512, new=128, response=256)

    cases: dict[str, Callable[[], Iterable[Turn]]] = {
        "64 + 64 tokens": singles(64),
        "512 + 512 tokens": singles(512),
        "20 turns, 8,064 tokens": conversations,
    }
    # What is made once, on first use, and grows with the longest path.
    held([generations.single(8192, 8192)])
    rows = []
    for name, turns in cases.items():
        progress(f"memory: {name}")
        found = held(turns())
        per_token, per_record = 1 / found.tokens, 1 / found.records
        objects = (found.store - found.arrays - found.texts) * per_record
        rows += [
            row(
                f"{name}: store, per token",
                "B",
                [found.store * per_token],
                TARGETS.get(name),
            ),
            row(f"{name}: of that ids and logprobs", "B", [found.arrays * per_token]),
            row(f"{name}: of that texts", "B", [found.texts * per_token]),
            row(f"{name}: all else, per record", "B", [objects]),
            row(f"{name}: the store's own accounting", "x", [found.stated / found.store]),
            row(f"{name}: recorder's index, per record", "B", [found.index * per_record]),
            row(f"{name}: the page's summaries, per record", "B", [found.recent * per_record]),
        ]
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
