"""Tables: aligned for people, tab-separated for programs, or objects as JSON.

Every value passes through `visible`: most are an agent's or a model's own words.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recorder_core.cli.formats import plain, shown
from recorder_core.cli.visible import visible

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its name is the row's field, and the header."""

    name: str
    title: str = ""
    """What people read above it; by default its name."""
    people: Callable[[Any], str] = shown
    """How people read its values."""
    right: bool = False
    optional: bool = False
    """Not shown to people where no row has it."""
    field: Callable[[Row], Any] | None = None
    """What people see, where that is not the value."""

    def value(self, row: Row) -> str:
        """The cell for people."""
        value = row[self.name] if self.field is None else self.field(row)
        return "" if value is None else visible(self.people(value))


def write_table(columns: Sequence[Column], rows: Iterable[Row], *, as_json: bool) -> None:
    """Write rows to the standard output.

    Args:
        columns: What people and programs see of a row; JSON has all of it.
        rows: By the columns' names. Written as they come, but on a terminal.
        as_json: One object a line.
    """
    if as_json:
        write_json(rows)
    elif sys.stdout.isatty():
        _write_aligned(columns, list(rows))
    else:
        write_line(each.name for each in columns)
        for row in rows:
            write_line(plain(row[each.name]) for each in columns)


def write_json(rows: Iterable[Row]) -> None:
    """One object a line, in ASCII: what a terminal might obey is escaped. No number is null."""
    for row in rows:
        known = {name: None if _is_no_number(value) else value for name, value in row.items()}
        text = json.dumps(known, allow_nan=False).replace("\x7f", "\\u007f")
        sys.stdout.write(text + "\n")


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def write_line(values: Iterable[str]) -> None:
    """One line of tab-separated values; a tab in a value is shown as a sign."""
    sys.stdout.write("\t".join(map(visible, values)) + "\n")


def _write_aligned(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    from rich.box import SIMPLE_HEAD  # of the extra, and wanted on a terminal alone
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = {each.name: [each.value(row) for row in rows] for each in columns}
    seen = [each for each in columns if not each.optional or any(cells[each.name])]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, each in enumerate(seen):
        table.add_column(
            Text(visible(each.title or each.name)),
            justify="right" if each.right else "left",
            overflow="fold" if number == 0 else "ellipsis",
            no_wrap=number > 0,
        )
    for number in range(len(rows)):
        table.add_row(*(Text(cells[each.name][number]) for each in seen))
    Console(file=sys.stdout, highlight=False, markup=False, emoji=False).print(table)
