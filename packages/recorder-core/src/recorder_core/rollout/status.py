"""What a workflow gives back: counts, metrics and record keys, and never an experience."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from recorder_core.rollout.task import Task

Metrics = dict[str, float]
"""What a workflow measures of one run."""

_MAX_MESSAGE = 500
_MAX_MESSAGES = 20


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

    model_config = ConfigDict(frozen=True)

    completed_runs: int = Field(ge=0)
    """Runs that ended well."""
    total_runs: int = Field(ge=0)
    metrics: tuple[Metrics, ...] = ()
    """One for each completed run."""
    successful_ids: tuple[str, ...] = ()
    """The record keys of the completed runs, parallel to `metrics`."""
    failures: dict[Failure, int] = {}
    """Runs that failed, by reason."""
    message: str = ""
    """What went wrong, a line per run; the first ones where there are many."""

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
        text = f"{task.api_key}: {message}"
        text = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " …"
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
