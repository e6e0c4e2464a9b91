"""The live view: for people at a terminal, and silent elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console

from recorder_core import EID, Experience
from recorder_core.rollout import CollectedRun, Failure, Status, Task
from recorder_core.rollout.progress import LiveProgress


def play(progress: LiveProgress) -> None:
    """Three runs: one succeeds at once, one on its second attempt, one fails."""
    runs = Task(task_id="t", workflow="a:B", repeat_times=4).runs("7")
    progress.submitted("7", 3)
    for run, reward in ((runs[0], 1.0), (runs[1], 0.5)):
        experience = Experience(
            eid=EID(batch="7", task="t", run=run.run_id),
            tokens=[1] * 1500,
            prompt_length=500,
            action_mask=[True] * 1000,
            reward=reward,
        )
        progress.succeeded(CollectedRun(run, {}, [experience]))
    failed = Status.failure(runs[2], Failure.ERROR, "no")
    progress.failed(runs[2], failed, retried=True)
    progress.failed(runs[3], failed, retried=False)


def test_a_terminal_shows_runs_tokens_and_reward() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveProgress(console) as progress:
        play(progress)
        progress.closed("7")
    shown = console.file.getvalue()
    assert "batch 7  2/3  failed 1  retried 1  tokens 2,000  reward 0.750" in shown


def test_elsewhere_it_is_quiet_and_counts_all_the_same() -> None:
    console = Console(file=io.StringIO())
    with LiveProgress(console) as progress:
        play(progress)
        assert progress.counts["7"].metrics() == {
            "runs/total": 3,
            "runs/succeeded": 2,
            "runs/failed": 1,
            "runs/retried": 1,
            "tokens": 2000,
            "reward": 0.75,
        }
        progress.closed("7")
    assert console.file.getvalue() == ""
    assert progress.counts == {}


def test_the_rollout_layer_needs_neither_the_view_nor_ray_nor_torch() -> None:
    program = "import sys, recorder_core.rollout; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # httpx brings rich where it is installed; the view itself is not loaded.
    unwanted = {"recorder_core.rollout.progress", "ray", "torch", "fastapi", "uvicorn"}
    assert not unwanted & set(done.stdout.split())
