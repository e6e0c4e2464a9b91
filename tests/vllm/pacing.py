"""Keeps the tiny model's long generations long, for the tests that act while one runs.

On a machine short of CPU the engine can be done with thousands of tokens before a client gets to
its first; a generation that sleeps leaves the others their time, and cannot be over too early.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

STEP_S = 0.01
LONG_TOKENS = 300
"""Requests for at least so many tokens are paced, and whatever is batched with them."""


class Pace(LogitsProcessor):
    """Sleeps at each step of a batch that has a long request; changes no logit."""

    def __init__(self, *args: Any) -> None:
        self._long: set[int] = set()

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM skips the others when all requests are greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._long -= set(batch_update.removed)
        for index, params, *_ in batch_update.added:
            self._long.discard(index)
            if (params.max_tokens or 0) >= LONG_TOKENS:
                self._long.add(index)
        for source, target, direction in batch_update.moved:
            moved, swapped = source in self._long, target in self._long
            self._long -= {source, target}
            if moved:
                self._long.add(target)
            if swapped and direction.name == "SWAP":
                self._long.add(source)

    def apply(self, logits: Any) -> Any:
        if self._long:
            time.sleep(STEP_S)
        return logits
