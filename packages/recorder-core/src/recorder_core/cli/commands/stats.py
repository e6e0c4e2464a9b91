"""`recorder stats`: what became of every generation, and what is held."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recorder_core.cli.exits import Exit
from recorder_core.cli.files import Files
from recorder_core.cli.places import Places, places
from recorder_core.cli.progress import Arrivals, progress
from recorder_core.cli.tables import Column, write_json, write_table
from recorder_core.keys import KeyPrefix
from recorder_core.runs import Run


def run(args: argparse.Namespace) -> int:
    """Show the counters, a column for each engine, or for all files together."""
    where = places(args, prefixes=False)
    counters = _of_files(where) if where.files else _of_engines(args, where)
    if args.json:
        write_json({"of": name, **nested} for name, nested in counters.items())
        return Exit.DONE
    flat = {name: dict(_flattened(nested)) for name, nested in counters.items()}
    columns = [Column("counter"), *(Column(name, right=True) for name in flat)]
    names = dict.fromkeys(name for values in flat.values() for name in values)
    rows = ({"counter": name} | {of: flat[of].get(name) for of in flat} for name in names)
    write_table(columns, rows, as_json=False)
    return Exit.DONE


def _of_engines(args: argparse.Namespace, where: Places) -> dict[str, Mapping[str, Any]]:
    from recorder_core.cli.engines import connected  # files want no HTTP client

    with connected(args, where.urls) as client:
        return {
            url: {
                "recorder": dataclasses.asdict(reply.recorder),
                "store": dataclasses.asdict(reply.store),
            }
            for url, reply in client.stats().items()
        }


def _of_files(where: Places) -> dict[str, Mapping[str, Any]]:
    arrivals = Arrivals()
    files = Files(where.files, arrivals)
    with progress(arrivals, "reading"):
        return {files.name: _summed(files.runs(KeyPrefix()))}


def _summed(runs: Iterable[Run]) -> Mapping[str, Any]:
    total: Counter[str] = Counter(
        dict.fromkeys(("runs", "records", "rewarded", "prompt_tokens", "sampled_tokens"), 0)
    )
    finished: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    flagged: Counter[str] = Counter()
    for each in runs:
        records = each.records.values()
        total["runs"] += 1
        total["records"] += len(records)
        total["rewarded"] += each.rewarded
        total["prompt_tokens"] += sum(record.prompt_count for record in records)
        total["sampled_tokens"] += sum(record.response_count for record in records)
        finished.update(record.finish_reason.value for record in records)
        flagged.update(flag for record in records for flag in record.flags)
        missing.update(each.missing)
    counts = {"finished": dict(finished), "missing": dict(missing), "flagged": dict(flagged)}
    return {**total, **counts}


def _flattened(nested: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Counters by their whole name: `recorder.dropped.aborted`."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
