"""Workflows for trainers' tests; runners import them by name, without torch."""

from __future__ import annotations

from typing import Any

from recorder_core import EID, Experience, Sampling, VersionSpan
from recorder_core.rollout import Metrics, Workflow, WorkflowWithRecording
from tests.core.rollout.workflows import complete


def as_json(experience: Experience) -> dict[str, Any]:
    """What `Replay` makes of it again, to the last bit."""
    assert experience.logprobs is not None
    assert experience.sampling is not None
    return {
        "tokens": experience.tokens.tolist(),
        "prompt_length": experience.prompt_length,
        "logprobs": [
            value if sampled else 0.0
            for value, sampled in zip(
                experience.logprobs.tolist(), experience.action_mask.tolist(), strict=True
            )
        ],
        "action_mask": experience.action_mask.tolist(),
        "reward": experience.reward,
        "model_versions": [list(span) for span in experience.model_versions],
    }


class Replay(Workflow):
    """Gives the trajectories in `raw_task["runs"]` that are its run's."""

    async def run_async(self) -> list[Experience]:
        runs: Any = self.task.raw_task["runs"]
        return [
            Experience(
                eid=EID(
                    batch=self.task.batch_id,
                    task=self.task.task_id,
                    run=self.task.run_id,
                    suffix=f"{index}",
                ),
                sampling=Sampling(temperature=1.0, logprobs_mode="processed_logprobs"),
                model_versions=tuple(VersionSpan(*span) for span in given.pop("model_versions")),
                **given,
            )
            for index, given in enumerate(runs[self.task.run_id])
        ]


class Guesser(WorkflowWithRecording):
    """Asks the engine for a token, twice; its reward is the number of its run."""

    async def run_async(self) -> Metrics:
        prompt = [1, 2, 3]
        for _ in range(2):
            reply = await complete(self, prompt)
            prompt = [*prompt, *reply["ids"], 4]
        await self.update_reward(float(self.task.run_id))
        return {"length": float(len(prompt))}
