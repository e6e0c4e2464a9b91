"""Experiences: whole trajectories, as a trainer takes them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from recorder_core.arrays import BoolArray, boolean, equal, float32, int32
from recorder_core.keys import RecordKey, read_run
from recorder_core.records import (
    NEUTRAL,
    FinishReason,
    MultiModalItem,
    Record,
    RoutedExperts,
    Sampling,
    VersionSpan,
    check_spans,
)
from recorder_core.sampling_mask import SamplingMask


class EID(msgspec.Struct, frozen=True, gc=False):
    """The identity of an experience."""

    batch: str
    task: str
    run: int | str
    """A number, or a name that is none."""
    step: int = 0
    """Generations on the trajectory before its last."""
    suffix: str = ""
    """The id of the trajectory's last record: unique."""

    def __post_init__(self) -> None:
        if isinstance(self.run, str):  # in one spelling
            force_setattr(self, "run", read_run(self.run))
        elif self.run < 0 or self.step < 0:
            raise ValueError(f"run is {self.run} and step {self.step}; neither is below 0")

    @property
    def key(self) -> RecordKey:
        """The run that the experience belongs to."""
        return RecordKey(self.batch, self.task, self.run)

    def __str__(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


class ExperienceTurn(msgspec.Struct, frozen=True, gc=False):
    """One generation on a trajectory's path: where its sampled tokens lie, and its record.

    Everything else of it is the record's, and can be asked of the turn: `request_id`,
    `finish_reason`, `sampling`, `flags`, `reward` and so on.
    """

    start: int
    """Where its sampled tokens begin, in the response region."""
    end: int
    """One past its last sampled token, in the response region."""
    record: Record

    @property
    def record_id(self) -> str:
        """The record's id."""
        return self.record.id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        return getattr(self.record, name)


_PER_TOKEN = (
    ("action_mask", boolean),
    ("logprobs", float32),
    ("token_level_reward", float32),
    ("advantages", float32),
    ("returns", float32),
    ("teacher_logprobs", float32),
)


class Experience(msgspec.Struct, kw_only=True, eq=False, omit_defaults=True):
    """One trajectory: the first prompt, then everything after it (the response region).

    The response region holds the sampled tokens of every generation on the path and, between
    them, the tokens that the environment or the chat template put there. Arrays may be given as
    lists.

    Raises:
        ValueError: Lengths disagree, or a value does not fit its dtype.
    """

    eid: EID
    tokens: np.ndarray[Any, Any]
    """Every token of the trajectory: int32 [length]."""
    prompt_length: int
    """Tokens of the first prompt."""
    logprobs: np.ndarray[Any, Any] | None = None
    """float32 [response length]; NaN where the engine sampled nothing or gave no logprob."""
    action_mask: np.ndarray[Any, Any] | None = None
    """True where the model sampled the token and it is to be trained: bool [response length]."""
    reward: float | None = None
    """That of the deepest generation on the path that was given one, else the run's."""
    token_level_reward: np.ndarray[Any, Any] | None = None
    """float32 [response length]; 0 where no generation on the path was given one."""
    advantages: np.ndarray[Any, Any] | None = None
    """float32 [response length]."""
    returns: np.ndarray[Any, Any] | None = None
    """float32 [response length]."""
    teacher_logprobs: np.ndarray[Any, Any] | None = None
    """float32 [response length]."""
    info: dict[str, Any] = {}
    """The run's notes, then those of the generations on the path."""
    metrics: dict[str, float] = {}
    prompt_text: str | None = None
    response_text: str | None = None
    """The sampled tokens as text, before any tool or reasoning parser; None where several turns
    have only their own, in `turns`."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    truncate_status: str | None = None
    """`response_truncated` if the last generation met its token limit."""
    finish_reason: FinishReason | None = None
    """The last generation's."""
    routed_experts: RoutedExperts | None = None
    """length - 1 rows; the rows that no engine gave are outside its `valid` ranges."""
    sampling_mask: SamplingMask | None = None
    """Over the response region; tokens that nobody sampled have no ids."""
    model_versions: tuple[VersionSpan, ...] = ()
    """Spans over the response region; tokens that nobody sampled are in none."""
    sampling: Sampling = NEUTRAL
    """The first generation's; each has its own in `turns`."""
    adapter: str | None = None
    turns: tuple[ExperienceTurn, ...] = ()
    multi_modal_inputs: tuple[MultiModalItem, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = int32(self.tokens, "tokens")
        count = len(self.tokens) - self.prompt_length
        if count < 0 or self.prompt_length < 0:
            raise ValueError(f"prompt_length is {self.prompt_length} for {len(self.tokens)} tokens")
        for name, as_array in _PER_TOKEN:
            given = getattr(self, name)
            if given is not None:
                values = as_array(given, name)
                _check_length(name, values, count)
                if values is not given:
                    setattr(self, name, values)
        if self.finish_reason is not None and type(self.finish_reason) is not FinishReason:
            self.finish_reason = FinishReason(self.finish_reason)
        if type(self.model_versions) is not tuple:
            self.model_versions = tuple(self.model_versions)
        check_spans(self.model_versions, count)
        routed = self.routed_experts
        if routed is not None and routed.end > max(len(self.tokens) - 1, 0):
            raise ValueError(
                f"routed_experts ends at row {routed.end}, {len(self.tokens)} tokens have "
                f"{len(self.tokens) - 1} rows"
            )
        mask = self.sampling_mask
        if mask is not None:
            _check_length("sampling_mask", mask.counts, count)

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def model_version(self) -> str | None:
        """The weights that sampled the first token."""
        return self.model_versions[0].version if self.model_versions else None

    @property
    def model_version_range(self) -> tuple[str, str] | None:
        """The first and the last weights along the path (labels have no other order)."""
        spans = self.model_versions
        return (spans[0].version, spans[-1].version) if spans else None

    @property
    def logprobs_valid(self) -> BoolArray:
        """Where `logprobs` holds a value of the engine's: bool [response length].

        A value that is there need not be one of the policy's: see `logprobs_of_policy`.
        """
        if self.logprobs is None:
            return np.zeros(self.response_length, dtype=np.bool_)
        valid: BoolArray = ~np.isnan(self.logprobs)
        return valid

    @property
    def logprobs_of_policy(self) -> BoolArray:
        """Where `logprobs` are those of the policy at the recorded temperature.

        bool [response length]. As far as the engine tells, by generation: see
        `Record.logprobs_of_policy`.
        """
        mask = self.logprobs_valid
        for turn in self.turns:
            if not turn.record.logprobs_of_policy:
                mask[turn.start : turn.end] = False
        return mask

    @property
    def on_policy_exact(self) -> bool:
        """Whether every trained token's logprob is the policy's at the recorded temperature."""
        exact = self.logprobs_of_policy
        return bool(exact.all() if self.action_mask is None else exact[self.action_mask].all())

    def replace(self, **changes: Any) -> Experience:
        """A copy with other values."""
        return msgspec.structs.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Experience):
            return NotImplemented
        return all(equal(getattr(self, name), getattr(other, name)) for name in _FIELDS)

    __hash__ = object.__hash__


_FIELDS = tuple(each.name for each in msgspec.structs.fields(Experience))


def _check_length(name: str, values: np.ndarray[Any, Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} response tokens")
