"""What a store holds, as rows of its file, and back."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from recorder_core.codec import decode_hook, decode_record, encode_hook, encode_record
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import Record
from recorder_core.runs import Run
from recorder_core.stores.memory import MAX_REMEMBERED
from recorder_core.stores.sqlite.changes import Batch, LeaseRow, RunRow


class _Learnt(msgspec.Struct, omit_defaults=True):
    """What may become known of a record when it is written already."""

    reward: float | None = None
    token_level_reward: np.ndarray[Any, Any] | None = None
    info: dict[str, Any] = {}
    delivered: bool | None = None
    flags: tuple[str, ...] = ()


_SLACK = 1024
_NAMES = tuple(each.name for each in msgspec.structs.fields(_Learnt))
_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)
_learnt = msgspec.msgpack.Decoder(_Learnt, dec_hook=decode_hook)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds; times are those of `time.time`."""

    runs: list[tuple[RunRow, Run]] = field(default_factory=list)
    """Those written to least recently first; records in the order in which they were written."""
    leases: list[LeaseRow] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    blocked: list[Selection] = field(default_factory=list)
    gone: list[Run] = field(default_factory=list)
    session: int = 0
    """How often it was opened."""
    settled: int = 0
    """Of the records that the last session was given: those that were on the disk, or gone."""


def encode_values(values: Mapping[str, Any]) -> bytes | None:
    """Write notes, or counts by reason; None: there are none.

    Raises:
        ValueError: They cannot be written.
    """
    try:
        return _encoder.encode(dict(values)) if values else None
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"info cannot be written: {error}") from error


def _decode_values(blob: bytes | None) -> dict[str, Any]:
    return msgspec.msgpack.decode(blob, type=dict[str, Any]) if blob else {}


def write(connection: sqlite3.Connection, batch: Batch, *, offset: float, records: bool) -> None:
    """Write a batch, within a transaction.

    Args:
        connection: To the file.
        batch: What is to be written.
        offset: What makes the store's times those of `time.time`, in seconds.
        records: Whether to write those that were added; the rest needs next to no room.
    """
    run = connection.execute
    many = connection.executemany
    for part, whole in batch.joined:
        run("UPDATE OR REPLACE records SET run = ? WHERE run = ?", (whole, part))
        run("DELETE FROM runs WHERE number = ?", (part,))
    many("DELETE FROM records WHERE run = ?", [(number,) for number in batch.deleted])
    many("DELETE FROM runs WHERE number = ?", [(number,) for number in batch.deleted])
    many(
        "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (_run_values(each, offset) for each in batch.runs),
    )
    if records:
        for number, record in batch.added:
            blob = encode_record(record)
            generation = run("INSERT INTO generations (record) VALUES (?)", (blob,)).lastrowid
            run(
                "INSERT OR REPLACE INTO records (run, id, generation) VALUES (?, ?, ?)",
                (number, record.id, generation),
            )
    many(
        "UPDATE records SET learnt = ? WHERE run = ? AND id = ?",
        ((_learnt_of(record), number, record.id) for number, record in batch.learnt),
    )
    many("DELETE FROM leases WHERE name = ?", [(name,) for name in batch.leases_over])
    many(
        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
        (
            (each.name, *_selected(each.where), each.lease_s, each.expires_at + offset, each.more)
            for each in batch.leases
        ),
    )
    many(
        "INSERT OR REPLACE INTO acknowledged (name) VALUES (?)",
        [(name,) for name in batch.acknowledged],
    )
    many(
        "INSERT OR REPLACE INTO blocked (whole, selected) VALUES (?, ?)",
        [_selected(where) for where in batch.blocked],
    )
    many("DELETE FROM gone WHERE key = ?", [(key.text,) for key, each in batch.gone if not each])
    many(
        "INSERT OR REPLACE INTO gone (key, dropped, evicted) VALUES (?, ?, ?)",
        (
            (key.text, encode_values(each.dropped), each.evicted)
            for key, each in batch.gone
            if each is not None
        ),
    )
    if batch.acknowledged:
        _forget_oldest(connection, "acknowledged")
    if batch.blocked:
        _forget_oldest(connection, "blocked")
    settled = batch.accepted - (0 if records else len(batch.added))
    run("UPDATE state SET settled = ?", (settled,))


def _run_values(row: RunRow, offset: float) -> tuple[Any, ...]:
    values = (row.number, row.key, row.lease, row.reward, encode_values(row.info))
    return (*values, encode_values(row.dropped), row.evicted, row.written + offset)


def _learnt_of(record: Record) -> bytes:
    return _encoder.encode(_Learnt(**{name: getattr(record, name) for name in _NAMES}))


def _selected(where: Selection) -> tuple[bool, str]:
    return isinstance(where, RecordKey), str(where)


def _selection(whole: int, selected: str) -> Selection:
    return RecordKey.parse(selected) if whole else KeyPrefix(selected)


def _forget_oldest(connection: sqlite3.Connection, table: str) -> None:
    """Keep the newest `MAX_REMEMBERED` of a table, and some more, so that it is rarely done."""
    first, last = connection.execute(
        f"SELECT min(number), max(number) FROM {table}"  # noqa: S608 - one of two names, above
    ).fetchone()
    if last - first >= MAX_REMEMBERED + _SLACK:
        connection.execute(
            f"DELETE FROM {table} WHERE number <= "  # noqa: S608
            f"(SELECT number FROM {table} ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (MAX_REMEMBERED,),
        )


def read(connection: sqlite3.Connection) -> Contents:
    """Read everything.

    Raises:
        ValueError: Something is not what this package writes.
        sqlite3.Error: The file is damaged.
    """
    query = connection.execute
    records: defaultdict[int, list[Record]] = defaultdict(list)
    found = query(
        "SELECT records.run, records.learnt, generations.record FROM generations "
        "JOIN records ON records.generation = generations.number ORDER BY generations.number"
    )
    for number, learnt, blob in found:
        record = decode_record(blob)
        if learnt is not None:
            record = record.replace(**msgspec.structs.asdict(_learnt.decode(learnt)))
        records[number].append(record)
    runs = []
    for row in query("SELECT * FROM runs ORDER BY written"):
        number, key, lease, reward, info, dropped, evicted, written = row
        parsed = RecordKey.parse(key)
        own = records.pop(number, [])
        for record in own:
            record.key = parsed  # one object for all of them
        values = (reward, _decode_values(info), _decode_values(dropped), evicted)
        run = RunRow(number, key, lease, *values, written)
        whole = Run(parsed, own, reward=reward, info=run.info, dropped=run.dropped, evicted=evicted)
        runs.append((run, whole))
    if records:
        raise ValueError(f"records belong to runs that are not there: {sorted(records)[:3]}")
    ((session, settled),) = query("SELECT session, settled FROM state").fetchall()
    return Contents(
        runs=runs,
        leases=[
            LeaseRow(name, _selection(whole, selected), lease_s, expires_at, bool(more))
            for name, whole, selected, lease_s, expires_at, more in query("SELECT * FROM leases")
        ],
        acknowledged=[name for (name,) in query("SELECT name FROM acknowledged ORDER BY number")],
        blocked=[
            _selection(*row) for row in query("SELECT whole, selected FROM blocked ORDER BY number")
        ],
        gone=[
            Run(RecordKey.parse(key), dropped=_decode_values(dropped), evicted=evicted)
            for key, dropped, evicted in query(
                "SELECT key, dropped, evicted FROM gone ORDER BY number"
            )
        ],
        session=session,
        settled=settled,
    )
