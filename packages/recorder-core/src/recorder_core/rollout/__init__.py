"""Rollouts: workflows play tasks against recording engines, and batches reach the trainer.

A workflow says what became of its run, and no more: the engine keeps the experiences, and the
scheduler drains them by the record keys of the runs that ended well.

Needs the extra `recorder-core[rollout]`. `recorder_core.rollout.progress` needs rich,
`recorder_core.rollout.ray_pool` needs Ray, `recorder_core.rollout.trl` TRL; none is imported here.
"""

from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.coordinator import BatchReport, RolloutCoordinator, by_task
from recorder_core.rollout.pool import LocalRunnerPool, Runner, RunnerPool
from recorder_core.rollout.runner import WorkflowRunner
from recorder_core.rollout.scheduler import Collected, CollectedRun, Listener, Scheduler
from recorder_core.rollout.status import Failure, Metrics, Status
from recorder_core.rollout.task import Task
from recorder_core.rollout.workflow import Workflow, WorkflowBase, WorkflowWithRecording

__all__ = [
    "BatchReport",
    "Collected",
    "CollectedRun",
    "EngineAddress",
    "Failure",
    "Listener",
    "LocalRunnerPool",
    "Metrics",
    "RolloutCoordinator",
    "Runner",
    "RunnerPool",
    "Scheduler",
    "Status",
    "Task",
    "Workflow",
    "WorkflowBase",
    "WorkflowRunner",
    "WorkflowWithRecording",
    "by_task",
]
