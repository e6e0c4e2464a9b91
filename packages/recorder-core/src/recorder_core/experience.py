"""Experiences: whole trajectories, as a trainer takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from recorder_core.arrays import ArrayModel, BoolArray, Float32Array, Int32Array
from recorder_core.keys import RecordKey
from recorder_core.records import (
    FinishReason,
    MultiModalItem,
    RoutedExperts,
    Sampling,
    VersionSpan,
    check_spans,
)


class EID(ArrayModel):
    """The identity of an experience."""

    batch: str
    task: str
    run: int = Field(ge=0)
    step: int = Field(default=0, ge=0)
    """Generations on the trajectory before its last."""
    suffix: str = ""
    """The id of the trajectory's last record: unique."""

    @property
    def key(self) -> RecordKey:
        """The run that the experience belongs to."""
        return RecordKey(self.batch, self.task, self.run)

    def __str__(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


class ExperienceTurn(ArrayModel):
    """One generation on a trajectory's path."""

    record_id: str
    request_id: str
    sample_index: int
    start: int
    """Where its sampled tokens begin, in the response region."""
    end: int
    """One past its last sampled token, in the response region."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    response_text: str | None = None
    reward: float | None = None
    attempt: int = 0
    cached_tokens: int | None = None
    created_at: float = 0.0
    finished_at: float = 0.0
    sampling: Sampling = Sampling()
    flags: tuple[str, ...] = ()


class Experience(ArrayModel):
    """One trajectory: the first prompt, then everything after it (the response region).

    The response region holds the sampled tokens of every generation on the path and, between
    them, the tokens that the environment or the chat template put there.

    Raises:
        pydantic.ValidationError: Lengths disagree, or a value does not fit its dtype.
    """

    eid: EID
    tokens: Int32Array
    """Every token of the trajectory: int32 [length]."""
    prompt_length: int = Field(ge=0)
    """Tokens of the first prompt."""
    logprobs: Float32Array | None = None
    """float32 [response length]; NaN where the engine sampled nothing or gave no logprob."""
    action_mask: BoolArray | None = None
    """True where the model sampled the token and it is to be trained: bool [response length]."""
    reward: float | None = None
    token_level_reward: Float32Array | None = None
    """float32 [response length]; 0 where no generation on the path was given one."""
    advantages: Float32Array | None = None
    """float32 [response length]."""
    returns: Float32Array | None = None
    """float32 [response length]."""
    teacher_logprobs: Float32Array | None = None
    """float32 [response length]."""
    info: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    prompt_text: str | None = None
    response_text: str | None = None
    """The client's text; None where several turns have only their own, in `turns`."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    truncate_status: str | None = None
    """`response_truncated` if the last generation met its token limit."""
    finish_reason: FinishReason | None = None
    """The last generation's."""
    routed_experts: RoutedExperts | None = None
    """length - 1 rows; the rows that no engine gave are outside its `valid` ranges."""
    model_versions: tuple[VersionSpan, ...] = ()
    """Spans over the response region; tokens that nobody sampled are in none."""
    sampling: Sampling = Sampling()
    """The first generation's; each has its own in `turns`."""
    adapter: str | None = None
    turns: tuple[ExperienceTurn, ...] = ()
    multi_modal_inputs: tuple[MultiModalItem, ...] = ()

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
        """Where `logprobs` holds a value of the engine's: bool [response length]."""
        if self.logprobs is None:
            return np.zeros(self.response_length, dtype=np.bool_)
        return ~np.isnan(self.logprobs)

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        count = self.response_length
        if count < 0:
            raise ValueError(f"prompt_length is {self.prompt_length} for {len(self.tokens)} tokens")
        for name in (
            "logprobs",
            "action_mask",
            "token_level_reward",
            "advantages",
            "returns",
            "teacher_logprobs",
        ):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ValueError(f"{name} has {len(array)} values for {count} response tokens")
        check_spans(self.model_versions, count)
        routed = self.routed_experts
        if routed is not None and routed.end > max(len(self.tokens) - 1, 0):
            raise ValueError(
                f"routed_experts ends at row {routed.end}, {len(self.tokens)} tokens have "
                f"{len(self.tokens) - 1} rows"
            )
        return self
