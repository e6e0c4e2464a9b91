"""The tables of a store's file, their version, and what makes it of a file of an earlier one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

APPLICATION_ID = 0x52454352
"""`RECR`, in the file's header: it is a record store, whatever its name."""
VERSION = 1
PAGE_BYTES = 16_384

# `generations` is only ever added to and deleted from. What changes is in small rows beside it:
# the run that a record is in, what was learnt of it, the run's own reward.
_TABLES = """
    CREATE TABLE runs (
        number INTEGER PRIMARY KEY,
        key TEXT NOT NULL,
        lease TEXT,
        reward REAL,
        info BLOB,
        dropped BLOB,
        evicted INTEGER NOT NULL,
        written REAL NOT NULL
    );
    CREATE TABLE generations (number INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
    CREATE TABLE records (
        run INTEGER NOT NULL,
        id TEXT NOT NULL,
        generation INTEGER NOT NULL,
        learnt BLOB,
        PRIMARY KEY (run, id)
    ) WITHOUT ROWID;
    CREATE TRIGGER deleted AFTER DELETE ON records BEGIN
        DELETE FROM generations WHERE number = OLD.generation;
    END;
    CREATE TABLE leases (
        name TEXT PRIMARY KEY,
        whole INTEGER NOT NULL,
        selected TEXT NOT NULL,
        lease_s REAL NOT NULL,
        expires_at REAL NOT NULL,
        more INTEGER NOT NULL
    );
    CREATE TABLE acknowledged (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL);
    CREATE TABLE blocked (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        whole INTEGER NOT NULL,
        selected TEXT NOT NULL,
        UNIQUE (whole, selected)
    );
    CREATE TABLE gone (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key TEXT UNIQUE NOT NULL,
        dropped BLOB,
        evicted INTEGER NOT NULL
    );
    CREATE TABLE state (session INTEGER NOT NULL, settled INTEGER NOT NULL);
    INSERT INTO state VALUES (0, 0);
"""

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""By version: what makes a file of that version one of the next. Each runs once, and whole."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Where the disk is full SQLite has undone it already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file."""
    # Both have to come before all else. A generation is some tens of kilobytes.
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.executescript(
        f"BEGIN; {_TABLES} PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {VERSION}; COMMIT;"
    )


def migrate(connection: sqlite3.Connection) -> None:
    """Make a file of an earlier version one of this version, step by step, or leave it as it is."""
    with transaction(connection):
        for version in range(version_of(connection), VERSION):
            MIGRATIONS[version](connection)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def version_of(connection: sqlite3.Connection) -> int:
    """The version that a file has."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
