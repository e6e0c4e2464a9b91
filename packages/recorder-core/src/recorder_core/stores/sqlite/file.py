"""The file of a store: opened by one process at a time, looked through, written to."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from recorder_core.errors import RecorderError, StoreFileError
from recorder_core.stores.sqlite import rows, schema
from recorder_core.stores.sqlite.changes import Batch
from recorder_core.stores.sqlite.rows import Contents
from recorder_core.stores.sqlite.tally import Tally

_BUSY_S = 1.0
"""How long another process may take to let go of the file."""
_CHECKPOINT_PAGES = 1024
_WAL_BYTES = 64 * 1024**2
"""What the log beside the file may keep of the disk when it is empty."""
_SPARE_PAGES = 64
_VACUUM_PAGES = 512


class Written(NamedTuple):
    """What became of a batch: what kept it, or the part of it, from the disk."""

    rest: Exception | None = None
    """All but the records that were added: a few bytes each."""
    records: Exception | None = None


class StoreFile:
    """An SQLite database in WAL mode, locked for this process until it is closed or killed.

    A commit is in the system's hands when it returns: it survives the end of the process at any
    moment. The end of the machine it survives once the system has written it out; the file is
    sound then too.

    Args:
        path: The database; made where there is none.
        clock: The store's time.

    Raises:
        StoreFileError: It is no file of a record store, is damaged, is that of a later release, or
            another process has it; it is left as it is.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        if not path.parent.is_dir():
            raise StoreFileError(f"{path}: the folder {path.parent} is not there; make it first")
        if path.is_dir():
            raise StoreFileError(f"{path} is a folder; name a file in it")
        try:
            if not path.exists() or not path.stat().st_size:
                _create(path)
            self.contents = _look_through(path)
            """What it held when it was opened."""
            self._connection = _open(path, self.contents)
            try:
                self._tally = Tally(path.with_name(f"{path.name}-tally"))
                self.lost = self._begin_session()
                """Records that the last session was given, and that never came to the disk."""
            except BaseException:
                self._connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, RecorderError):
                raise
            raise StoreFileError(f"{path}: {_reason(error)}") from error

    def _begin_session(self) -> int:
        session, given = self._tally.read()
        lost = given - self.contents.settled if session == self.contents.session else 0
        with schema.transaction(self._connection):
            self._connection.execute(
                "UPDATE state SET session = ?, settled = 0", (self.contents.session + 1,)
            )
        # Not before the file knows the session: what it counts is told once.
        self._tally.begin(self.contents.session + 1)
        return max(lost, 0)

    def count(self, given: int) -> None:
        """So many records were given in this session."""
        self._tally.count(given)

    def write(self, batch: Batch) -> Written:
        """Write a batch; where the disk has no room for its records, the rest of it."""
        error = self._attempt(batch, records=True)
        if error is None:
            return Written()
        if not batch.added:
            return Written(error, error)
        return Written(self._attempt(batch, records=False), error)

    def _attempt(self, batch: Batch, *, records: bool) -> Exception | None:
        offset = time.time() - self._clock()
        try:
            with schema.transaction(self._connection):
                rows.write(self._connection, batch, offset=offset, records=records)
        except Exception as error:  # noqa: BLE001 - whoever waits is told, and it is tried again
            return error
        return None

    def give_back(self) -> bool:
        """Give pages that nothing is in any more back to the file system, some at a time.

        Returns:
            Whether there may be more of them.
        """
        query = self._connection.execute
        try:
            ((free,),) = query("PRAGMA freelist_count")
            ((pages,),) = query("PRAGMA page_count")
            # Some are wanted again in a moment.
            if free <= max(_SPARE_PAGES, pages // 4):
                return False
            query(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
        except sqlite3.Error:
            return False  # what is to be written comes first, and says what is wrong
        return True

    def close(self, *, whole: bool) -> None:
        """Let go of it.

        Args:
            whole: Whether everything is written.
        """
        self._connection.close()
        self._tally.close(keep=not whole)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,  # transactions begin where we say so
        check_same_thread=False,
    )


def _create(path: Path) -> None:
    """Make an empty store, under its name only when it is whole."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        connection = _connect(draft, "rwc")
        try:
            schema.create(connection)
        finally:
            connection.close()
        if not path.exists():
            # Not replaced: another process may have been faster.
            os.link(draft, path)
            draft.unlink()
        else:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _look_through(path: Path) -> Contents:
    """Read all that is there, and change nothing.

    Raises:
        StoreFileError: It is not ours, or damaged.
        sqlite3.Error: It cannot be read.
    """
    connection = _connect(path, "ro")
    try:
        try:
            ((application,),) = connection.execute("PRAGMA application_id")
        except sqlite3.DatabaseError as error:
            if "not a database" not in str(error):
                raise
            application = 0
        if application != schema.APPLICATION_ID:
            raise StoreFileError(
                f"{path} is no record store, but another program's; name another file, or one that "
                "is not there"
            )
        version = schema.version_of(connection)
        if not 0 < version <= schema.VERSION:
            raise StoreFileError(
                f"{path} has version {version} of its tables, this release knows those up to "
                f"{schema.VERSION}: use the release that wrote it"
            )
        if version < schema.VERSION:
            connection.close()
            return _migrated(path)
        ((verdict,),) = connection.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise ValueError(verdict)
        return rows.read(connection)
    except (ValueError, sqlite3.DatabaseError) as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise StoreFileError(
            f"{path} is damaged ({error}); it is left as it is: `sqlite3 {path} .recover` may get "
            "records out of it; to go on, name another file"
        ) from error
    finally:
        connection.close()


def _migrated(path: Path) -> Contents:
    connection = _connect(path, "rw")
    try:
        schema.migrate(connection)
    finally:
        connection.close()
    return _look_through(path)


def _open(path: Path, contents: Contents) -> sqlite3.Connection:
    """Open the file for this process alone."""
    connection = _connect(path, "rw")
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.execute("PRAGMA recursive_triggers = ON")  # for what INSERT OR REPLACE deletes
        with schema.transaction(connection):
            ((session,),) = connection.execute("SELECT session FROM state")
        if session != contents.session:
            raise StoreFileError(f"{path} was opened by another process just now")
    except BaseException:
        connection.close()
        raise
    return connection


def _reason(error: Exception) -> str:
    text = str(error)
    if "locked" in text:
        return "it is in use by another process; end that one, or name another file"
    if "readonly" in text or "read-only" in text:
        return f"it cannot be written ({text}); name a file on a disk that can be"
    return text
