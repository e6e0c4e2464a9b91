"""What Harbor has of an agent's run: its own trajectories, and the token ids of its generations.

Tested with Harbor 0.26: its models and its validator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recorder_core.errors import ExportError
from recorder_core.experience import Experience
from recorder_core.export.atif import document, is_trained, turn_metrics


def trajectory(
    experiences: Sequence[Experience],
    *,
    agent: str,
    agent_version: str,
    model_name: str | None = None,
) -> Any:
    """A run as one `harbor.models.trajectories.Trajectory`, for `agent/trajectory.json`.

    Args:
        experiences: The trajectories of one run, that of the main agent first. Those of subagents
            and branches are embedded in it.
        agent: The agent's name.
        agent_version: The agent's version.
        model_name: The model's name.

    Returns:
        The trajectory, in the format of `recorder_core.export.atif`.

    Raises:
        ExportError: There are none, they are of several runs, or one has no turns.
        ImportError: Harbor is not installed.
    """
    from harbor.models.trajectories import Trajectory

    main, *others = [
        document(each, agent=agent, agent_version=agent_version, model_name=model_name)
        for each in _of_one_run(experiences)
    ]
    return Trajectory(**main, subagent_trajectories=others or None)


def rollout_details(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """A run as Harbor's `RolloutDetail`s: the ids of each turn, as a trainer takes them from it.

    A turn that is trained in another of the trajectories is only there: who trains every
    completion trains no token twice. Where a logprob is missing, the whole detail has none, since
    its lists are by turn. Masks, versions and finish reasons are in `extra`.

    Args:
        experiences: The trajectories of one run, that of the main agent first.

    Returns:
        One for each trajectory with a turn to be trained.

    Raises:
        ExportError: There are none, they are of several runs, or one has no turns.
    """
    details = []
    for each in _of_one_run(experiences):
        if not each.turns:
            raise ExportError(f"{each.eid} has no turns; Harbor has the ids of each generation")
        turns = [turn_metrics(each, turn) for turn in each.turns if is_trained(each, turn)]
        if not turns:
            continue
        detail = {
            name: [turn[name] for turn in turns]
            for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
        }
        if None in detail["logprobs"]:
            del detail["logprobs"]
        extra = {name: [turn["extra"][name] for turn in turns] for name in turns[0]["extra"]}
        details.append({**detail, "extra": extra})
    return details


def agent_context(experiences: Sequence[Experience]) -> Any:
    """What a run of a Harbor agent leaves behind: an `AgentContext`, with its `rollout_details`.

    Args:
        experiences: The trajectories of one run, that of the main agent first.

    Returns:
        The context; each generation counts once in its numbers of tokens.

    Raises:
        ExportError: There are none, they are of several runs, or one has no turns.
        ImportError: Harbor is not installed.
    """
    from harbor.models.agent.context import AgentContext

    details = rollout_details(experiences)
    generations = {
        turn.record_id: turn_metrics(each, turn) for each in experiences for turn in each.turns
    }
    cached = [each["cached_tokens"] for each in generations.values()]
    return AgentContext(
        n_input_tokens=sum(each["prompt_tokens"] for each in generations.values()),
        n_cache_tokens=None if None in cached else sum(cached),
        n_output_tokens=sum(each["completion_tokens"] for each in generations.values()),
        rollout_details=details,
    )


def _of_one_run(experiences: Sequence[Experience]) -> Sequence[Experience]:
    runs = sorted({each.eid.key.text for each in experiences})
    if len(runs) != 1:
        raise ExportError(f"Harbor has a trajectory for one run, these are of {len(runs)}: {runs}")
    return experiences
