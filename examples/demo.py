"""The main job on a real model: a stock engine serves, agents play, the run is recorded.

    python -m examples.demo         # vLLM
    python -m examples.demo sglang

Starts the engine with `--enable-recording` and SmolLM2-135M-Instruct, plays a few dozen episodes
through the OpenAI client, writes their rewards back, drains the batch and shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from examples.capitals import TASKS, Task, play
from examples.report import conclude, show
from examples.sglang_server import SGLangServer
from examples.smollm2 import smollm2
from examples.vllm_server import VLLMServer
from recorder_core.client import AsyncRecordClient

BATCH = "demo"
ENGINES = {"vllm": VLLMServer, "sglang": SGLangServer}


async def run_batch(
    base_url: str, model: str, records: AsyncRecordClient, runs: int, progress: Progress
) -> None:
    """Play every task `runs` times at once; each run's reward is written when it ends."""
    bar = progress.add_task("Playing episodes", total=len(TASKS) * runs)

    async def one_run(task: Task, run: int) -> None:
        key = f"{BATCH}/{task.id}/{run}"
        answers = await play(
            task, base_url=f"{base_url}/v1", api_key=key, model=model, stream=run % 2 == 1
        )
        await records.update_reward(key, task.reward(answers))
        progress.advance(bar)

    await asyncio.gather(*(one_run(task, run) for task in TASKS for run in range(runs)))


async def main(engine: str, runs: int) -> None:
    """Everything between an empty machine and a training batch."""
    console = Console(width=100 if not Console().is_terminal else None)
    progress = Progress(
        SpinnerColumn(),
        "[progress.description]{task.description}",
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    console.print("Preparing SmolLM2-135M-Instruct (converted once) ...")
    model = smollm2()
    # The agents below hold record keys; only this process holds the admin key.
    admin_key = secrets.token_urlsafe(16)
    server = ENGINES[engine](
        model, "--enable-recording", name="smollm2", env={"RECORDER_ADMIN_KEY": admin_key}
    )
    console.print(f"Starting {' '.join(server.command[1:])}")
    console.print(f"  (its log: {server.log_path})")
    begun = time.monotonic()
    with console.status("Waiting for the engine ..."), server:
        console.print(f"  up after {time.monotonic() - begun:.0f} s")
        async with AsyncRecordClient(server.base_url, admin_key=admin_key) as records:
            with progress:
                await run_batch(server.base_url, server.name, records, runs, progress)
            async with records.drain(BATCH, wait_s=10) as drained:
                experiences = drained.experiences
            stats = (await records.stats())[server.base_url].recorder
    show(experiences, AutoTokenizer.from_pretrained(model), console)
    conclude(drained.runs, experiences, stats, model, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="?", choices=ENGINES, default="vllm")
    parser.add_argument("--runs", type=int, default=4, help="runs per task (default: 4)")
    args = parser.parse_args()
    asyncio.run(main(args.engine, args.runs))
