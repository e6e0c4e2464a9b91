"""`recorder tail`: generations as they are recorded."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from recorder_core.cli.engines import connected
from recorder_core.cli.exits import Exit
from recorder_core.cli.lines import Lines
from recorder_core.cli.places import places
from recorder_core.cli.streams import say
from recorder_core.cli.tables import Column
from recorder_core.client import RecordClient
from recorder_core.client.calls import RECENT_ENTRIES
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.recent import Generation, News

_WAIT_S = 10.0
"""How long an engine may be silent before it is asked again."""
_WAIT_FOR_ALL_S = 1.0
"""The same of several: what one tells waits for the answers of the others."""

_COLUMNS = (
    Column("finished", people=lambda text: text[11:19]),
    Column("key"),
    Column("prompt_tokens", "prompt", right=True),
    Column("sampled_tokens", "sampled", right=True),
    Column("mean_logprob", "mean lp", lambda value: f"{value:.2f}", right=True),
    Column("min_logprob", "min lp", lambda value: f"{value:.2f}", right=True),
    Column("finish_reason", "finish"),
    Column("weights"),
    Column("text"),
)
_WIDTHS = (8, 24, 7, 7, 7, 7, 6, 8, 0)


def run(args: argparse.Namespace) -> int:
    """Follow them, until the time is over or the command is interrupted."""
    where = places(args, files=False)
    lines = Lines(_COLUMNS, _WIDTHS, as_json=args.json)
    with connected(args, where.urls) as client:
        followed = _Followed(client, where.prefix)
        _show(lines, followed.last(args.last), args.min_lp)
        end = float("inf") if args.seconds is None else time.monotonic() + args.seconds
        while (left := end - time.monotonic()) > 0:
            _show(lines, followed.new(left), args.min_lp)
    return Exit.DONE


class _Followed:
    """What is told of the generations under a prefix.

    Args:
        client: Of the engines.
        prefix: Which runs.
    """

    def __init__(self, client: RecordClient, prefix: KeyPrefix) -> None:
        self._client = client
        self._prefix = prefix
        self._cursors: dict[str, str] = {}
        self._wait_s = _WAIT_S if len(client.urls) == 1 else _WAIT_FOR_ALL_S

    def last(self, count: int) -> list[Generation]:
        """The generations that ended last, of those that the engines remember."""
        found: list[Generation] = []
        whole = True
        while whole:
            told = self._ask(0.0)
            whole = any(len(each.generations) + len(each.runs) == RECENT_ENTRIES for each in told)
            found = sorted([*found, *self._wanted(told)], key=_when)[-count:] if count else []
        return found

    def new(self, wait_s: float) -> list[Generation]:
        """What was recorded since, in the order in which it ended; waits for it so long."""
        return sorted(self._wanted(self._ask(min(wait_s, self._wait_s))), key=_when)

    def _ask(self, wait_s: float) -> list[News]:
        told = self._client.recent(self._cursors, wait_s=wait_s)
        for url, news in told.items():
            if news.missed and url in self._cursors:
                say(f"{url} recorded more than it remembers: generations are left out here")
            self._cursors[url] = news.next
        return list(told.values())

    def _wanted(self, told: Iterable[News]) -> Iterator[Generation]:
        for news in told:
            for each in news.generations:
                if self._prefix.matches(RecordKey.parse(each.key)):
                    yield each


def _when(generation: Generation) -> tuple[float, str]:
    return generation.finished_at, generation.id


def _show(lines: Lines, generations: Iterable[Generation], below: float | None) -> None:
    """Show generations, but those all of whose tokens are likelier than is asked for."""
    for each in generations:
        if below is None or (each.logprob_min is not None and each.logprob_min < below):
            lines.write(_row(each))
    sys.stdout.flush()


def _row(generation: Generation) -> dict[str, Any]:
    finished = datetime.fromtimestamp(generation.finished_at).astimezone()
    return {
        "finished": finished.isoformat(timespec="milliseconds"),
        "key": generation.key,
        "id": generation.id,
        "prompt_tokens": generation.prompt,
        "sampled_tokens": generation.response,
        "mean_logprob": generation.logprob_mean,
        "min_logprob": generation.logprob_min,
        "finish_reason": generation.finish_reason,
        "weights": "→".join(generation.versions),
        "text": generation.text,
    }
