"""What several tests ask of records."""

from __future__ import annotations

from collections.abc import Iterable

from recorder_core import Record


def whole_prompts(records: Iterable[Record]) -> dict[str, list[int]]:
    """The prompt of each record by its id, with what the records before it on its path hold."""
    known = {record.id: record for record in records}

    def prompt(record: Record) -> list[int]:
        before = None if record.before is None else known[record.before]
        path = [] if before is None else [*prompt(before), *before.response_ids.tolist()]
        return [*path[: record.start], *record.prompt_ids.tolist()]

    return {name: prompt(record) for name, record in known.items()}
