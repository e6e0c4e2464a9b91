"""A tiny policy, and trajectories whose logprobs are exactly its own, as an engine records them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from recorder_core import EID, Experience, FinishReason, Sampling, VersionSpan
from tests.models import tiny_qwen3_float32

REWARDS = {"sum": [0.0, 1.0, 1.0, 3.0], "sort": [2.0, 0.0, 0.5, 0.0]}
"""Of each task's runs."""
RUNS = [f"b/{task}/{run}" for task, rewards in REWARDS.items() for run in range(len(rewards))]
SHIFT = 0.3


def load() -> Any:
    """The policy, in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3_float32(), dtype=torch.float32).eval()


def logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Of each token but the first, given those before it: float32 [T - 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    chosen = torch.tensor(tokens[1:])[:, None]
    return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy()


def trajectory(
    model: Any,
    task: str,
    run: int,
    *,
    reward: float | None,
    seed: int | None = None,
    temperature: float = 1.0,
    suffix: str = "",
    **fields: Any,
) -> Experience:
    """Two turns with an observation between them; lengths differ from run to run."""
    random = np.random.default_rng([len(task), run if seed is None else seed])
    prompt = np.random.default_rng(len(task)).integers(10, 500, 4).tolist()
    first, seen, second = 3 + run, 2 + run % 2, 4
    count = first + seen + second
    tokens = prompt + random.integers(10, 500, count).tolist()
    sampled = np.array([True] * first + [False] * seen + [True] * second)
    values = logprobs(model, tokens, temperature)[len(prompt) - 1 :]
    return Experience(
        eid=EID(batch="b", task=task, run=run, suffix=suffix or f"{task}{run}"),
        tokens=tokens,
        prompt_length=len(prompt),
        logprobs=np.where(sampled, values, math.nan),
        action_mask=sampled,
        reward=reward,
        finish_reason=fields.pop("finish_reason", FinishReason.STOP),
        sampling=Sampling(temperature=temperature, logprobs_mode="processed_logprobs"),
        model_versions=(VersionSpan(0, first, "1"), VersionSpan(first + seen, count, "2")),
        **fields,
    )


def groups(model: Any, **fields: Any) -> list[Experience]:
    """Two groups of four runs, a trajectory each, on policy."""
    return [
        trajectory(model, task, run, reward=reward, **fields)
        for task, rewards in REWARDS.items()
        for run, reward in enumerate(rewards)
    ]


def poisoned(experiences: list[Experience], value: float) -> list[Experience]:
    """The same with another logprob at each token that is not to be trained."""
    return [
        each.replace(logprobs=np.where(each.action_mask, each.logprobs, value))
        for each in experiences
    ]


def shifted(experiences: list[Experience], by: float = SHIFT) -> list[Experience]:
    """As if the engine had found every sampled token likelier than the trainer does."""
    return [each.replace(logprobs=each.logprobs + by) for each in experiences]


def gradient(model: Any) -> np.ndarray[Any, Any]:
    """All gradients of a model, end to end."""
    return np.concatenate(
        [p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]
    )
