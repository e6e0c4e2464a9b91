"""`SQLiteStore`: runs that survive the process.

`changes` keeps what is not on the disk yet, `writer` is the thread that brings it there, `file` is
where it goes, `schema` and `rows` are what that looks like, `tally` counts what a crash took.
"""

from recorder_core.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
