"""Stock TRL trains on what stock vLLM has recorded: two processes, a CPU, no glue.

    python -m examples.grpo_trl

For each seed: a random tiny policy is pushed into the running engine; then, step by step, TRL asks
for rollouts, agents play them through the OpenAI client and write their rewards back, the batch is
drained and trained, and the new weights go into the engine by its own route, under a new label.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.grpo_trl.game import PROMPTS, play
from examples.grpo_trl.policy import new_policy, new_tokenizer, save
from examples.vllm_server import VLLMServer
from recorder_core import Experience, export
from recorder_core.client import AsyncRecordClient, RecordClient

# The two lines that are of a CPU. On GPUs: [], and {"bf16": True}.
ENGINE = ["--dtype", "float32"]
TRAINER: dict[str, Any] = {"use_cpu": True, "bf16": False}

SEEDS = 3
STEPS = 25
RUNS_PER_PROMPT = 8
RATIO_TOLERANCE = 0.01
"""How far TRL's probability of a sampled token may be from the recorded one."""
LEARNED = 0.5
"""By how much the mean reward has to rise, for each seed."""
RATIO = "sampling/importance_sampling_ratio"


class Rollouts:
    """What TRL asks for rollouts, and tells of new weights.

    Args:
        server: The engine.
        admin_key: Of its records.
        folder: Where weights are put for the engine to read.
        name: What the record keys begin with.
    """

    def __init__(self, server: VLLMServer, admin_key: str, folder: Path, name: str) -> None:
        self._server = server
        self._admin_key = admin_key
        self._folder = folder
        self._name = name

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play one run for each prompt; what TRL's `rollout_func` is."""
        batch_id = f"{self._name}/{trainer.state.global_step}"
        seen: Counter[str] = Counter()
        runs = {}
        for prompt in prompts:
            runs[f"{batch_id}/{prompt.replace(' ', '-')}/{seen[prompt]}"] = prompt
            seen[prompt] += 1
        asyncio.run(self._play(runs))
        with self._records() as records, records.drain(batch_id, wait_s=10) as drained:
            check(drained.experiences, trainer.state.global_step)
            batch = export.rows(drained.experiences)
            return export.trl.rollout(batch, list(runs), temperature=trainer.temperature)

    async def _play(self, runs: dict[str, str]) -> None:
        url = self._server.base_url
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="of each run") as agents,
            AsyncRecordClient(url, admin_key=self._admin_key) as records,
        ):

            async def one(key: str, prompt: str) -> None:
                reward = await play(agents.with_options(api_key=key), prompt)
                await records.update_reward(key, reward)

            await asyncio.gather(*(one(key, prompt) for key, prompt in runs.items()))

    def push(self, policy: Any, version: int) -> None:
        """From the next request on, the engine samples from this policy."""
        policy.save_pretrained(self._folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        with httpx.Client(base_url=self._server.base_url, timeout=120) as engine:
            engine.post("/collective_rpc", json=reload).raise_for_status()
            # What the cache holds was computed with the old weights.
            engine.post("/reset_prefix_cache").raise_for_status()
        with self._records() as records:
            records.set_version(version)

    def _records(self) -> RecordClient:
        return RecordClient(self._server.base_url, admin_key=self._admin_key)


def check(experiences: list[Experience], version: int) -> None:
    """What the records promise: both turns in one trajectory, and the right weights."""
    for each in experiences:
        assert len(each.turns) == 2, f"{each.eid} has {len(each.turns)} turns"
        assert {span.version for span in each.model_versions} == {str(version)}, each.eid


def ratio_error(log: dict[str, float]) -> float:
    """The largest `|ratio - 1|` of a step: TRL's probabilities against the recorded ones."""
    return max(abs(log[f"{RATIO}/min"] - 1), abs(log[f"{RATIO}/max"] - 1))


class Printed(TrainerCallback):
    """A line for each step, in place of all that TRL logs."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL has logged a step."""
        log = state.log_history[-1]
        if "reward" in log:
            print(
                f"seed {args.seed}  step {state.global_step:2}  reward {log['reward']:.3f}  "
                f"|ratio - 1| <= {ratio_error(log):.1e}",
                flush=True,
            )


def learn(seed: int, steps: int, rollouts: Rollouts, folder: Path) -> list[dict[str, float]]:
    """Train a policy from random weights; what TRL has logged of each step."""
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(PROMPTS) * RUNS_PER_PROMPT,
        num_generations=RUNS_PER_PROMPT,
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=seed,
        **TRAINER,
    )
    trainer = GRPOTrainer(
        model=new_policy(seed),
        reward_funcs=export.trl.recorded_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=new_tokenizer(),
        rollout_func=rollouts,
        callbacks=[Printed()],
    )
    trainer.remove_callback(PrinterCallback)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    export.trl.use_engine(trainer, lambda: rollouts.push(policy, trainer.state.global_step))
    trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


def show(logs: list[list[dict[str, float]]], console: Console) -> None:
    """Print what each seed has learned."""
    table = Table(title="mean reward")
    for name in ("seed", "first step", "last step", "largest |ratio - 1|"):
        table.add_column(name, justify="right")
    for seed, log in enumerate(logs):
        first, last = log[0]["reward"], log[-1]["reward"]
        table.add_row(str(seed), f"{first:.3f}", f"{last:.3f}", f"{max(map(ratio_error, log)):.1e}")
    console.print(table)


def main(seeds: int, steps: int, vllm: str | None) -> None:
    """Serve, learn for each seed, show."""
    console = Console(width=100 if not Console().is_terminal else None)
    torch.set_num_threads(1)  # the engine needs the other core
    # Of TRL and transformers about each other.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="grpo-trl-"))
    logs = []
    try:
        save(new_policy(0), folder)
        admin_key = secrets.token_urlsafe(16)
        server = VLLMServer(
            folder,
            *["--enable-recording", "--logprobs-mode", "processed_logprobs", *ENGINE],
            *["--max-model-len", "256"],
            name="policy",
            command=vllm,
            # The dev mode has the routes with which a trainer replaces weights.
            env={"RECORDER_ADMIN_KEY": admin_key, "VLLM_SERVER_DEV_MODE": "1"},
            log=folder / "server.log",
        )
        console.print(f"Starting {' '.join(server.command)}")
        with server:
            for seed in range(seeds):
                rollouts = Rollouts(server, admin_key, folder, f"seed-{seed}")
                logs.append(learn(seed, steps, rollouts, folder / "trl"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(logs, console)
    console.print(f"{time.monotonic() - begun:.0f} s in all.")
    for seed, log in enumerate(logs):
        assert all(ratio_error(step) < RATIO_TOLERANCE for step in log), f"seed {seed}: {log}"
        rewards = [step["reward"] for step in log]
        assert rewards[-1] > rewards[0] + LEARNED, f"seed {seed} has learned nothing: {rewards}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--vllm", help="the vllm command; by default that of this environment")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.steps, arguments.vllm)
