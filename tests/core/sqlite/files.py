"""What the tests of `SQLiteStore` share: waiting until it is safe, and looking into its file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recorder_core.stores.sqlite import SQLiteStore


def saved(store: SQLiteStore, *, records: bool = True) -> Exception | None:
    """Wait for what was changed so far; gives what kept it from the disk."""
    future: Future[Exception | None] = Future()
    store.when_safe(future.set_result, records=records)
    return future.result(30)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file of a store that is closed."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        yield connection
    finally:
        connection.close()


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query finds in the file of a store that is closed."""
    with reading(path) as connection:
        return connection.execute(query).fetchall()
