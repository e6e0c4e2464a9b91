"""What is to be rolled out: the task, its identity, and the workflow that plays it."""

from __future__ import annotations

import json
from pkgutil import resolve_name
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from typing_extensions import Self

from recorder_core.keys import RecordKey, sign


def _workflow_name(workflow: Any) -> Any:
    """A class by the name under which another process can import it."""
    if not isinstance(workflow, type):
        return workflow
    module, name = workflow.__module__, workflow.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ValueError(
            f"workflow {name} is defined in {module}; runners are other processes, which import "
            "it by name: move it to the top level of a module"
        )
    return f"{module}:{name}"


def _as_json(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Data that arrives in another process as it is: JSON has no NaN, and only Unicode text."""
    json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    return data


_JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_as_json)]


class Task(BaseModel):
    """A task and how it is to be rolled out; plain data, which any process can be sent as JSON.

    Example:
        >>> task = Task(task_id="7", workflow="agents.math:MathWorkflow", repeat_times=8)
        >>> [run.api_key for run in task.runs("12")][:2]
        ['12/7/0', '12/7/1']
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    batch_id: str = "0"
    """One or more components of the record key; `Scheduler.submit` sets it."""
    task_id: str
    """One component of the record key; the runs of one task are one group."""
    run_id: int = Field(default=0, ge=0)
    """The run, or the first of `repeat_times` runs."""
    workflow: Annotated[str, BeforeValidator(_workflow_name)]
    """`package.module:Class`; the class itself is taken too."""
    raw_task: _JsonObject = {}
    """The task's own data, e.g. a row of a data set."""
    workflow_args: _JsonObject = {}
    """Settings of the workflow."""
    rollout_args: _JsonObject = {}
    """Sampling parameters for the agent, e.g. temperature."""
    is_eval: bool = False
    """Its runs are measured and not trained."""
    repeat_times: int = Field(default=1, ge=1)
    """How many runs are wanted."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that one run may take; None: as the scheduler or runner says."""
    attempt: int = Field(default=0, ge=0)
    """How many runs failed before this one, which is tried in their place."""
    signature: str = Field(default="", repr=False)
    """What its record key is signed with, `~<expiry>.<signature>`, while it is carried out; empty:
    it is not signed."""

    @property
    def record_key(self) -> RecordKey:
        """The key under which the engine records the run."""
        return RecordKey(self.batch_id, self.task_id, self.run_id)

    @property
    def api_key(self) -> str:
        """The record key as an agent's API key, where keys are not signed."""
        return self.record_key.text

    @property
    def signed_key(self) -> str:
        """The record key as an agent's API key, signed if it is to be."""
        return self.record_key.text + self.signature

    def signed(self, secret: str | None, lifetime_s: float) -> Self:
        """The task for an agent, which is recorded as this run until its time is over.

        Args:
            secret: The engine's; None leaves the task as it is.
            lifetime_s: Seconds.
        """
        if secret is None:
            return self
        signature = sign(self.record_key, secret, lifetime_s).removeprefix(self.api_key)
        return self.model_copy(update={"signature": signature})

    @property
    def workflow_class(self) -> type[Any]:
        """The workflow, imported.

        Raises:
            TypeError: The name stands for something that is no class.
            ImportError, AttributeError: There is nothing of that name.
        """
        found = resolve_name(self.workflow)
        if not isinstance(found, type):
            raise TypeError(f"workflow {self.workflow!r} is {found!r}, it must be a class")
        return found

    def runs(self, batch_id: str | None = None) -> list[Task]:
        """One task for each of the `repeat_times` runs, in a batch."""
        update = {"repeat_times": 1, "batch_id": self.batch_id if batch_id is None else batch_id}
        return [
            self.model_copy(update={**update, "run_id": self.run_id + n})
            for n in range(self.repeat_times)
        ]

    def retried(self, run_id: int) -> Task:
        """The task for another attempt, under a run of its own."""
        return self.model_copy(update={"run_id": run_id, "attempt": self.attempt + 1})

    @model_validator(mode="after")
    def _is_a_key(self) -> Self:
        _ = self.record_key
        return self
