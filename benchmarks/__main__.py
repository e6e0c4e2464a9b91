"""Run every benchmark in sequence and print one table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

from benchmarks.harness import arguments, machine, progress, report

# The quiet ones first.
CORE = ["memory", "recording", "assembly", "store", "sqlite", "transfer", "front_ends", "draining"]
ENGINE = ["event_loop", "serving"]


def main() -> None:
    args = arguments(__doc__)
    where = machine()
    names = list(CORE)
    if importlib.util.find_spec("vllm"):
        names += ENGINE
    else:
        progress(f"no vLLM in this environment: {' and '.join(ENGINE)} are left out")
    rows = []
    for name in names:
        progress(f"benchmarks.{name} …")
        # Each in a process of its own: the heap that one leaves behind would slow the next.
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "-"]
        command += ["--quick"] * args.quick
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rows += json.loads(done.stdout)["rows"]
    report(rows, where, args)


if __name__ == "__main__":
    main()
