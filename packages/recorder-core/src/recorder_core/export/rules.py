"""What is done with generations that a trainer cannot take as they are, or should not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from recorder_core.errors import ExportError

TokenPolicy = Literal["error", "mask", "keep"]
"""For the tokens of a generation: refuse the batch, take them out of the mask, train them."""
RowPolicy = Literal["error", "drop", "mask", "keep"]
"""For a whole row: refuse the batch, leave the row out, give it with nothing to train, train it.

A row that is left out or masked still counts in its group's baseline: its run's reward is a fact.
"""


def int_label(label: str) -> int | None:
    """A version label as the number that it spells: `12`, `v12`; None where it spells none."""
    digits = label[1:] if label[:1] in ("v", "V") else label
    return int(digits) if digits.isascii() and digits.isdigit() else None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for `rows`. What is refused by default is what could be wrong in silence.

    Raises:
        ExportError: A rule has a value that it does not know.

    Example:
        >>> Rules(aborted="mask", constrained="mask").aborted
        'mask'
    """

    missing_logprobs: Literal["error", "mask"] = "error"
    """Sampled tokens without a finite logprob; as 0.0 they would claim probability 1."""
    implausible_logprobs: TokenPolicy = "error"
    """Generations that the recorder flagged `logprobs_implausible`."""
    inexact_logprobs: TokenPolicy = "error"
    """Logprobs that are not those of the plain softmax at the recorded temperature.

    That softmax is what trainers recompute. `raw_logprobs` at another temperature than 1 are those
    of another distribution, and so are all where top_p, top_k or min_p cut tokens off.
    """
    constrained: TokenPolicy = "error"
    """Generations flagged `constrained`: sampled under a grammar, which no trainer applies."""
    biased: TokenPolicy = "error"
    """Generations flagged `biased`: by penalties, `logit_bias`, `min_tokens` and the like."""
    forced_tokens: TokenPolicy = "mask"
    """Generations flagged `forced_tokens`: the engine put in tokens that nobody sampled."""
    aborted: RowPolicy = "drop"
    """Trajectories whose last generation ended in `abort` or `error`."""
    truncated: RowPolicy = "keep"
    """Trajectories whose last generation met its token limit."""
    incomplete: RowPolicy = "drop"
    """Trajectories of runs that are not recorded whole; see `rows`."""
    empty: RowPolicy = "drop"
    """Trajectories with nothing to train: their tokens are all trained elsewhere, or masked."""
    missing_reward: RowPolicy = "error"
    """Trajectories of runs without a finite reward; kept, they have the advantage 0."""
    multi_modal: RowPolicy = "error"
    """Trajectories with images or the like, of which token ids alone are not what the model saw."""
    reward: Literal["same", "mean", "max", "last"] = "same"
    """A run's one reward, where its trajectories have different ones; `same` refuses that."""
    mixed_adapters: Literal["error", "keep"] = "error"
    """Trajectories of different LoRA adapters in one batch."""
    mixed_temperatures: Literal["error", "keep"] = "error"
    """Generations at different temperatures in one batch; most trainers know only one."""
    version: Callable[[str], int | None] = int_label
    """A version label as a number of 0 or more; None: unknown, which only some trainers refuse."""
    current: int | None = None
    """The version of the trainer's weights; wanted with `max_staleness`."""
    max_staleness: int | None = None
    """How many versions older than `current` the weights that sampled a token may be."""
    stale: Literal["drop", "mask"] = "drop"
    """Drop trajectories with a token older than that, or mask those tokens alone."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            allowed, given = get_args(hints[each.name]), getattr(self, each.name)
            if isinstance(each.default, str) and given not in allowed:
                raise ExportError(f"{each.name} is {given!r}, it must be one of {allowed}")
        if self.max_staleness is not None and self.current is None:
            raise ExportError(
                "max_staleness is counted from the version of the trainer's weights: pass it as "
                "`current`"
            )
