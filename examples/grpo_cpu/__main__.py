"""Reinforcement learning, whole, on a CPU: stock vLLM records, a policy learns from the records.

    python -m examples.grpo_cpu

For each seed: a random tiny policy is pushed into the running engine; then, step by step, agents
play, the batch is drained, GRPO trains on it, and the new weights go back into the engine. Prints
the reward of every step, and saves the curves as a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from examples.grpo_cpu.game import DIGITS_PER_TURN, tasks
from examples.grpo_cpu.grpo import Trainer, group_advantages
from examples.grpo_cpu.policy import digit_ids, new_policy, save_tokenizer
from examples.vllm_server import VLLMServer
from recorder_core import Experience
from recorder_core.client import AsyncRecordClient
from recorder_core.rollout import EngineAddress, LocalRunnerPool, RolloutCoordinator, Scheduler
from recorder_core.rollout.progress import LiveProgress

SEEDS = 3
STEPS = 15
RUNS_PER_TASK = 8
RATIO_TOLERANCE = 0.01
"""How far the trainer's probability of an on-policy token may be from the recorded one."""
LEARNED = 0.25
"""By how much the mean reward has to rise, for each seed."""
ON = {"VLLM_SERVER_DEV_MODE": "1"}
"""The routes with which a trainer replaces weights."""


class Weights:
    """Brings a policy's weights into a running engine, and names them."""

    def __init__(self, base_url: str, records: AsyncRecordClient, folder: Path) -> None:
        self._records = records
        self._folder = folder
        self._http = httpx.AsyncClient(base_url=base_url, timeout=120)

    async def push(self, policy: Any, version: str) -> None:
        """From the next request on, the engine samples from this policy."""
        await asyncio.to_thread(policy.save_pretrained, self._folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        (await self._http.post("/collective_rpc", json=reload)).raise_for_status()
        # What the cache holds was computed with the old weights.
        (await self._http.post("/reset_prefix_cache")).raise_for_status()
        await self._records.set_version(version)

    async def close(self) -> None:
        await self._http.aclose()


def check(experiences: list[Experience], version: str, trainer: Trainer) -> None:
    """What the records promise: both turns, the right weights, the probabilities of the policy."""
    for each in experiences:
        assert len(each.turns) == 2, f"{each.eid} has {len(each.turns)} turns"
        assert each.action_mask.sum() == 2 * DIGITS_PER_TURN, each.eid
        assert {span.version for span in each.model_versions} == {version}, each.model_versions
    error = trainer.steps[-1].ratio_error
    assert error < RATIO_TOLERANCE, f"a ratio is off by {error} before the first step"


async def learn(
    seed: int, steps: int, engine: EngineAddress, weights: Weights, progress: LiveProgress
) -> tuple[list[float], list[float]]:
    """Train a policy from random weights; the mean reward of each step, and the ratio errors."""
    policy = new_policy(seed)
    trainer = Trainer(policy, digit_ids())
    rewards = []
    scheduler = Scheduler(LocalRunnerPool(1), [engine], listeners=[progress])
    async with scheduler:
        coordinator = RolloutCoordinator(scheduler, [group_advantages, trainer.step], min_group=2)
        for step in range(steps):
            version = f"seed-{seed}/step-{step}"
            await weights.push(policy, version)
            report = await coordinator.run(tasks(RUNS_PER_TASK, digit_ids()), f"{seed}/{step}")
            assert report.status.ok, report.status
            check(report.experiences, version, trainer)
            rewards.append(report.metrics()["reward"])
            print(
                f"seed {seed}  step {step:2}  reward {rewards[-1]:.3f}  "
                f"|ratio - 1| <= {trainer.steps[-1].ratio_error:.1e}",
                flush=True,
            )
    return rewards, [step.ratio_error for step in trainer.steps]


def plot(curves: list[list[float]], path: Path) -> None:
    """Save the reward curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for seed, curve in enumerate(curves):
        axes.plot(curve, marker=".", label=f"seed {seed}")
    axes.axhline(0.5, color="gray", linestyle=":", label="chance")
    axes.set(xlabel="step", ylabel="mean reward", title="GRPO on recorded rollouts", ylim=(0.4, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def show(curves: list[list[float]], errors: list[list[float]], console: Console) -> None:
    """Print what each seed has learned."""
    table = Table(title="mean reward")
    for name in ("seed", "first step", "last step", "largest |ratio - 1|"):
        table.add_column(name, justify="right")
    for seed, (curve, error) in enumerate(zip(curves, errors, strict=True)):
        table.add_row(str(seed), f"{curve[0]:.3f}", f"{curve[-1]:.3f}", f"{max(error):.1e}")
    console.print(table)


async def main(seeds: int, steps: int, picture: Path) -> None:
    """Serve, learn for each seed, show."""
    console = Console(width=100 if not Console().is_terminal else None)
    torch.set_num_threads(1)  # the engine needs the other core
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="grpo-"))
    try:
        new_policy(0).save_pretrained(folder)
        save_tokenizer(folder)
        admin_key = secrets.token_urlsafe(16)
        server = VLLMServer(
            folder,
            *["--enable-recording", "--dtype", "float32", "--max-model-len", "256"],
            # The records' logprobs are of what was sampled from: digits only.
            *["--logprobs-mode", "processed_logprobs"],
            name="policy",
            env={"RECORDER_ADMIN_KEY": admin_key, **ON},
            log=folder / "server.log",
        )
        console.print(f"Starting {' '.join(server.command[1:])}")
        with server:
            engine = EngineAddress(
                base_url=server.base_url, model_name="policy", admin_key=admin_key
            )
            curves, errors = [], []
            async with engine.records() as records:
                weights = Weights(server.base_url, records, folder)
                with LiveProgress(console) as progress:
                    for seed in range(seeds):
                        curve, error = await learn(seed, steps, engine, weights, progress)
                        curves.append(curve)
                        errors.append(error)
                await weights.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plot(curves, picture)
    show(curves, errors, console)
    console.print(f"{time.monotonic() - begun:.0f} s in all. The curves are in {picture}.")
    for seed, curve in enumerate(curves):
        assert curve[-1] > curve[0] + LEARNED, f"seed {seed} has learned nothing: {curve}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--picture", type=Path, default=Path("grpo_cpu.png"))
    arguments = parser.parse_args()
    asyncio.run(main(arguments.seeds, arguments.steps, arguments.picture))
