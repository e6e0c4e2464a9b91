"""A table that is written a line at a time, as its rows become known."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from recorder_core.cli.formats import plain
from recorder_core.cli.tables import Column, Row, write_json, write_line


class Lines:
    """Writes rows to the standard output: for people cut to the terminal's width.

    Args:
        columns: As for `write_table`.
        widths: How wide each is for people; 0 for the rest of the line. A longer value is not cut
            but moves the others, unless it is the last.
        as_json: One object a line.
    """

    def __init__(self, columns: Sequence[Column], widths: Sequence[int], *, as_json: bool) -> None:
        self._columns = columns
        self._widths = widths
        self._as_json = as_json
        self._for_people = sys.stdout.isatty() and not as_json
        if self._for_people:
            self._align([each.title or each.name for each in columns])
        elif not as_json:
            write_line(each.name for each in columns)

    def write(self, row: Row) -> None:
        """Write one."""
        if self._as_json:
            write_json([row])
        elif self._for_people:
            self._align([each.value(row) for each in self._columns])
        else:
            write_line(plain(row[each.name]) for each in self._columns)

    def _align(self, cells: Sequence[str]) -> None:
        from rich.cells import set_cell_size  # of the extra; knows how wide characters are

        parts = []
        for cell, column, width in zip(cells, self._columns, self._widths, strict=True):
            parts.append(cell.rjust(width) if column.right else cell.ljust(width))
        room = shutil.get_terminal_size().columns - 1
        sys.stdout.write(set_cell_size("  ".join(parts), room).rstrip() + "\n")
