"""A trajectory as text: what was asked, and what was sampled, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from recorder_core.cli.formats import counted
from recorder_core.cli.generations import known_logprobs, labels
from recorder_core.experience import Experience, ExperienceTurn


class Passage(NamedTuple):
    """Tokens in a row that came from one side, and their text."""

    part: str
    """`prompt`, `sampled`, or `between` for what came between two turns."""
    turn: int | None
    """Which turn sampled it, from 1."""
    tokens: int
    what: str
    """What is known of it, for people."""
    text: str | None
    """None where no text is recorded."""


def passages(trajectory: Experience) -> Iterator[Passage]:
    """The trajectory from its first token to its last."""
    count = trajectory.prompt_length
    what = f"prompt   {counted(count, 'token')}"
    yield Passage("prompt", None, count, what, trajectory.prompt_text)
    position = 0
    for number, turn in enumerate(trajectory.turns, 1):
        between = turn.start - position
        if between:
            # Engines give the text of a whole prompt, and of nothing that was put between.
            what = f"between   {counted(between, 'token')}"
            yield Passage("between", None, between, what, None)
        count, position = turn.end - turn.start, turn.end
        yield Passage("sampled", number, count, _of_turn(number, turn), turn.response_text)


def _of_turn(number: int, turn: ExperienceTurn) -> str:
    record = turn.record
    facts = [f"turn {number}", f"{counted(turn.end - turn.start, 'token')} sampled"]
    logprobs = known_logprobs(record)
    if len(logprobs):
        facts.append(f"mean logprob {logprobs.mean():.2f}")
    if record.sampling.temperature is not None:
        facts.append(f"temperature {record.sampling.temperature:g}")
    if record.versions:
        facts.append(f"weights {labels(record.versions)}")
    if record.finished_at > record.created_at > 0:
        facts.append(f"{1000 * (record.finished_at - record.created_at):,.0f} ms")
    return "   ".join([*facts, record.finish_reason.value])
