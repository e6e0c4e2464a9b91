"""What a workflow gives back: counts, metrics and record keys, and never an experience."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from math import isfinite
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    model_validator,
)
from typing_extensions import Self

from recorder_core.rollout.messages import printable
from recorder_core.rollout.task import Task

Metrics = dict[str, float]
"""What a workflow measures of one run: finite numbers by name."""

_MAX_MESSAGE = 500
_MAX_MESSAGES = 20
_MAX_TEXT = 2 * _MAX_MESSAGE * _MAX_MESSAGES
"""Room for the longest record keys before the messages."""


def _finite(metrics: Metrics) -> Metrics:
    for name, value in metrics.items():
        if not isfinite(value):
            raise ValueError(
                f"metric {printable(repr(name), 100)} is {value}; metrics are finite numbers: "
                "leave it out where there is nothing to measure"
            )
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"the name of metric {printable(repr(name), 100)} is no Unicode text")
    return metrics


def _printable(text: Any) -> Any:
    return printable(text, _MAX_TEXT) if isinstance(text, str) else text


class Failure(str, Enum):
    """Why a run failed."""

    ERROR = "error"
    """The workflow raised, or its class cannot be used."""
    TIMEOUT = "timeout"
    """It took longer than it may."""
    RUNNER_LOST = "runner_lost"
    """The process that carried it out ended, or no longer answered."""
    ENGINE_DOWN = "engine_down"
    """Its engine did not answer, or was started anew while it ran."""
    NO_RECORDS = "no_records"
    """It ended well, but nothing is recorded under its key."""
    CUT_OFF = "cut_off"
    """The batch was closed before it ended."""


class Status(BaseModel):
    """What became of one run, or of many.

    Small whatever the runs generated: the experiences stay in the engine, under the keys in
    `successful_ids`, until they are drained.
    """

    model_config = ConfigDict(frozen=True, revalidate_instances="always")

    completed_runs: int = Field(ge=0)
    """Runs that ended well."""
    total_runs: int = Field(ge=0)
    metrics: tuple[Annotated[Metrics, AfterValidator(_finite)], ...] = ()
    """One for each completed run."""
    successful_ids: tuple[str, ...] = ()
    """The record keys of the completed runs, parallel to `metrics`."""
    failures: dict[Failure, NonNegativeInt] = {}
    """Runs that failed, by reason."""
    message: Annotated[str, BeforeValidator(_printable)] = ""
    """What went wrong, run by run; bounded, and the first ones where there are many."""

    @property
    def ok(self) -> bool:
        """Whether every run ended well."""
        return self.completed_runs == self.total_runs

    @classmethod
    def success(cls, task: Task, metrics: Metrics | None = None) -> Status:
        """One run that ended well."""
        return cls(
            completed_runs=1,
            total_runs=1,
            metrics=(metrics or {},),
            successful_ids=(task.api_key,),
        )

    @classmethod
    def failure(cls, task: Task, reason: Failure, message: str) -> Status:
        """One run that failed."""
        text = f"{task.api_key}: {printable(message, _MAX_MESSAGE)}"
        return cls(completed_runs=0, total_runs=1, failures={reason: 1}, message=text)

    @classmethod
    def of_all(cls, parts: Iterable[Status]) -> Status:
        """Many runs' statuses as one."""
        parts = list(parts)
        failures: Counter[Failure] = Counter()
        for part in parts:
            failures.update(part.failures)
        messages = [part.message for part in parts if part.message]
        if len(messages) > _MAX_MESSAGES:
            messages[_MAX_MESSAGES:] = [f"… and {len(messages) - _MAX_MESSAGES} more"]
        return cls(
            completed_runs=sum(part.completed_runs for part in parts),
            total_runs=sum(part.total_runs for part in parts),
            metrics=tuple(each for part in parts for each in part.metrics),
            successful_ids=tuple(each for part in parts for each in part.successful_ids),
            failures=dict(failures),
            message="\n".join(messages),
        )

    def checked(self, task: Task) -> Status:
        """This status, once more and in full: an instance can be changed after its checks.

        Raises:
            ValueError: It does not hold together, or is not of one run, this task's.
        """
        status = Status.model_validate(self)
        if status.total_runs != 1 or not {task.api_key}.issuperset(status.successful_ids):
            raise ValueError(
                f"answers for {status.total_runs} runs, {list(status.successful_ids)[:3]}; "
                f"it must for one, {task.api_key}"
            )
        return status

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        failed = sum(self.failures.values())
        if self.completed_runs + failed != self.total_runs:
            raise ValueError(
                f"{self.completed_runs} completed and {failed} failed runs are not "
                f"{self.total_runs}; each run ends one way or the other"
            )
        parallel = {len(self.metrics), len(self.successful_ids)}
        if parallel != {self.completed_runs}:
            raise ValueError(
                f"{len(self.metrics)} metrics and {len(self.successful_ids)} successful_ids for "
                f"{self.completed_runs} completed runs; one of each is wanted for each run"
            )
        return self
