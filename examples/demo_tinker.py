"""The same through Tinker: a local server samples, agents play, `tinker-recorder serve` records.

    python -m examples.demo_tinker

Starts SkyRL's Tinker API with SmolLM2-135M-Instruct on the CPU and `tinker-recorder serve` before
it, plays a few episodes through the OpenAI client, writes their rewards back, drains the batch and
shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time

import tinker
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from examples.demo import BATCH, run_batch
from examples.report import conclude, show
from examples.smollm2 import smollm2
from recorder_core.client import AsyncRecordClient
from tests.tinker.servers import RecordingServer, SkyRLServer

NAME = "smollm2"


async def main(runs: int) -> None:
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
    service = SkyRLServer(model, sequence_ids=not tinker.__version__.startswith("0.25."))
    console.print("Starting SkyRL's Tinker API (it stands for Tinker, which wants an account)")
    console.print(f"  (its log: {service.log_path})")
    begun = time.monotonic()
    with console.status("Waiting for it ..."), service:
        server = RecordingServer(service, "--served-model-name", NAME, admin_key=admin_key)
        console.print(f"Starting tinker-recorder {' '.join(server.command[3:])}")
        console.print(f"  (its log: {server.log_path})")
        with server:
            console.print(f"  up after {time.monotonic() - begun:.0f} s")
            async with AsyncRecordClient(server.base_url, admin_key=admin_key) as records:
                with progress:
                    await run_batch(server.base_url, NAME, records, runs, progress)
                async with records.drain(BATCH, wait_s=10) as drained:
                    experiences = drained.experiences
                stats = (await records.stats())[server.base_url].recorder
    show(experiences, AutoTokenizer.from_pretrained(model), console)
    conclude(drained.runs, experiences, stats, model, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="runs per task (default: 2)")
    asyncio.run(main(parser.parse_args().runs))
