"""What the contract's tests begin with: a store, records, and short ways to ask for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import FinishReason, Record, new_id
from recorder_core.runs import Run
from recorder_core.stores.base import AddOutcome, Lease, RecordStore

ALL = KeyPrefix()
KEY = RecordKey("7", "sum", 0)
OTHER = RecordKey("7", "sum", 1)
LONG_S = 600.0
"""A lease that does not run out during a test."""
SHORT_S = 0.2
"""One that does."""


class GivenStore:
    """The fixtures of every part of the contract."""

    @pytest.fixture
    def make_store(self) -> Callable[[int], RecordStore]:
        """Makes an empty store with a byte budget; called as `make_store(max_bytes)`."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def store(self, make_store: Callable[[int], RecordStore]) -> Iterator[RecordStore]:
        """An empty store with room for everything that the tests put into it."""
        store = make_store(256 * 1024**2)
        yield store
        store.close()

    @pytest.fixture
    def busy_threads(self) -> Iterator[None]:
        """Makes threads change places after a few operations, not every 5 ms."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(usual)


def root(name: str = "root", key: RecordKey = KEY, tokens: int = 3, **fields: Any) -> Record:
    """A record of `tokens` prompt tokens and as many response tokens, which continues none."""
    given = {
        "id": name,
        "key": key,
        "prompt_ids": np.arange(tokens, dtype=np.int32),
        "response_ids": np.arange(tokens, dtype=np.int32) + 100,
        "logprobs": np.full(tokens, -0.5, dtype=np.float32),
        "finish_reason": FinishReason.STOP,
    }
    return Record.of(**{**given, **fields})


def child(parent: Record, name: str, **fields: Any) -> Record:
    """A record of one prompt token and two response tokens, which continues `parent`."""
    given = {
        "id": name,
        "key": parent.key,
        "parent": parent.id,
        "start": parent.end,
        "prompt_ids": [7],
        "response_ids": [8, 9],
        "logprobs": [-1.0, -2.0],
        "finish_reason": FinishReason.STOP,
    }
    return Record.of(**{**given, **fields})


def names(records: Iterable[Record]) -> list[str]:
    """The records' ids, in their order."""
    return [record.id for record in records]


def add(store: RecordStore, *records: Record) -> None:
    """Add records that the store has to take."""
    for record in records:
        assert store.add(record) is AddOutcome.STORED


def held(store: RecordStore, where: Selection = ALL) -> list[Record]:
    """The records in sight."""
    return [record for run in store.get(where) for record in run.records.values()]


def run_of(store: RecordStore, key: RecordKey = KEY) -> Run:
    """A run that has to be in sight."""
    (run,) = store.get(key)
    return run


def drain(
    store: RecordStore,
    where: Selection = ALL,
    lease_s: float = LONG_S,
    max_bytes: int | None = None,
) -> Lease:
    """Drain under a new name."""
    return store.drain(where, new_id(), lease_s, max_bytes)


def run_out(lease: Lease) -> None:
    """Wait until a lease is over."""
    time.sleep(lease.lease_s + 0.1)
