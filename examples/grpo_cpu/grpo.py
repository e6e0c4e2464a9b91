"""Group Relative Policy Optimization, small: Shao et al., "DeepSeekMath", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recorder_core import Experience
from recorder_core.collate import PaddedBatch, collate_padded
from recorder_core.rollout import by_task


def group_advantages(experiences: list[Experience]) -> list[Experience]:
    """How much better each run is than the others of its task, at each of its tokens."""
    advantaged = []
    for group in by_task(experiences).values():
        rewards = np.array([each.reward for each in group])
        values = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        advantaged += [
            each.replace(advantages=np.full(each.response_length, value, dtype=np.float32))
            for each, value in zip(group, values, strict=True)
        ]
    return advantaged


@dataclass(frozen=True)
class Step:
    """What one training step saw."""

    ratio_error: float
    """The largest `|ratio - 1|` before the weights moved: the policy against the records."""
    loss: float


class Trainer:
    """Trains a policy on recorded tokens.

    Args:
        policy: A causal language model.
        allowed_ids: What it may sample, as the engine was told: the records' logprobs are of the
            distribution over these.
        learning_rate: Of AdamW.
        epochs: Steps of the optimizer on each batch.
        clip: How far a ratio may move.
    """

    def __init__(
        self,
        policy: Any,
        allowed_ids: Sequence[int],
        *,
        learning_rate: float = 3e-3,
        epochs: int = 4,
        clip: float = 0.2,
    ) -> None:
        self.policy = policy
        self.epochs = epochs
        self.clip = clip
        self.steps: list[Step] = []
        self._forbidden = torch.full((policy.config.vocab_size,), -torch.inf)
        self._forbidden[list(allowed_ids)] = 0.0
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, experiences: list[Experience]) -> list[Experience]:
        """Train on one batch; the last function of a rollout pipeline."""
        batch = collate_padded(experiences, pad_token_id=0)
        assert batch.advantages is not None
        mask, ratio_error, loss = batch.action_mask, 0.0, torch.zeros(())
        for epoch in range(self.epochs):
            ratio = (self._logprobs(batch) - batch.logprobs)[mask].exp()
            if epoch == 0:
                ratio_error = (ratio - 1).abs().max().item()
            advantages = batch.advantages[mask]
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self._optimizer.step()
        self.steps.append(Step(ratio_error, loss.item()))
        return experiences

    def _logprobs(self, batch: PaddedBatch) -> torch.Tensor:
        """The policy's logprob of each response token: float32 [batch, max_response]."""
        logits = self.policy(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
        ).logits
        # A token's logprob comes from the logits one place before it.
        before = logits[:, batch.prompt_length - 1 : -1].float() + self._forbidden
        targets = batch.tokens[:, batch.prompt_length :]
        logprobs = before.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # Tokens that nobody sampled may be forbidden ones.
        return torch.where(batch.action_mask, logprobs, 0.0)
