"""`recorder show`: one run, as a report, or its forest, texts or tokens alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from recorder_core.cli.exits import CommandError, Exit
from recorder_core.cli.formats import counted, pairs
from recorder_core.cli.generations import Generations, Node, labels, trained
from recorder_core.cli.places import Places, places
from recorder_core.cli.progress import Arrivals, progress
from recorder_core.cli.sources import nothing, opened
from recorder_core.cli.streams import say
from recorder_core.cli.tables import Column, Row, write_json, write_table
from recorder_core.cli.texts import Passage, passages
from recorder_core.cli.tokens import token_rows
from recorder_core.cli.visible import visible
from recorder_core.experience import Experience

_TOKENS_ON_A_TERMINAL = 500
_CHARACTERS_OF_A_TEXT = 1_000
"""In the report; `--text` shows them whole."""

_FOREST = (
    Column(
        "number", "generation", field=lambda row: f"{row['branches']}{row['number']}", people=str
    ),
    Column("parent", "continues", right=True, optional=True),
    Column("prompt_tokens", "prompt", right=True),
    Column("sampled_tokens", "sampled", right=True),
    Column("trained_tokens", "trained", right=True),
    Column("leaf", right=True),
    Column("finish_reason", "finish"),
    Column("weights"),
    Column("reward", right=True, optional=True),
    Column("superseded", optional=True),
    Column("flags", optional=True),
    Column("id"),
)
_TOKENS = (
    Column("token", right=True),
    Column("id", people=str, right=True),
    Column("part"),
    Column("turn", right=True),
    Column("logprob", right=True),
    Column("trained"),
    Column("weights"),
)


def run(args: argparse.Namespace) -> int:
    """Show it."""
    where, arrivals = places(args, prefixes=False), Arrivals()
    if args.recent and where.files:
        raise CommandError("--recent is for engines: a file shows all that it has", Exit.USAGE)
    reading = opened(args, where, arrivals, drained=args.recent)
    with reading as source, progress(arrivals, "reading"):
        found = source.run(args.key)
        if found is None:
            nothing(source, args.key, *_drained(args, where))
    view = "tokens" if args.around is not None and args.view is None else args.view
    if args.around is not None and view != "tokens":
        raise CommandError("--around is a place among tokens; leave the other view out", Exit.USAGE)
    _VIEWS[view](Generations(found), args)
    return Exit.DONE


def _drained(args: argparse.Namespace, where: Places) -> list[str]:
    """Where a run is that was drained, if that is known."""
    if args.recent:
        return ["If it was drained, it is not remembered any more"]
    return [] if where.files else ["Drained runs: --recent"]


def _trajectory(generations: Generations, args: argparse.Namespace) -> Experience:
    """The trajectory that is asked for.

    Raises:
        CommandError: There is none of that number.
    """
    count, number = len(generations.trajectories), args.leaf or 1
    if not count:
        raise CommandError(f"{args.key} has no trajectory: all of it is superseded", Exit.NOTHING)
    if number > count:
        has = "1 leaf" if count == 1 else f"leaves 1 to {count}"
        raise CommandError(f"{args.key} has {has}, and no leaf {number}", Exit.NOTHING)
    return generations.trajectories[number - 1]


def _show_forest(generations: Generations, args: argparse.Namespace) -> None:
    write_table(_FOREST, map(_node_row, generations.nodes()), as_json=args.json)


def _node_row(node: Node) -> Row:
    record = node.record
    return {
        "number": node.number,
        "parent": node.parent,
        "prompt_tokens": record.prompt_end,
        "sampled_tokens": record.response_count,
        "trained_tokens": node.trained,
        "leaf": node.leaf,
        "finish_reason": record.finish_reason.value,
        "weights": labels(record.versions),
        "reward": record.reward,
        "superseded": node.superseded,
        "flags": ",".join(record.flags),
        "id": record.id,
        "branches": node.branches,
    }


def _show_tokens(generations: Generations, args: argparse.Namespace) -> None:
    trajectory = _trajectory(generations, args)
    length = len(trajectory.tokens)
    begin, end = 0, length
    if args.around is not None:
        if args.around >= length:
            raise CommandError(
                f"the trajectory has the tokens 0 to {length - 1}, and no {args.around}",
                Exit.NOTHING,
            )
        begin = max(args.around - args.context, 0)
        end = min(args.around + args.context + 1, length)
    elif sys.stdout.isatty() and not args.json:
        end = min(length, _TOKENS_ON_A_TERMINAL)
    write_table(_TOKENS, token_rows(trajectory, begin, end), as_json=args.json)
    if args.around is None and end < length:
        say(f"{counted(length - end, 'further token')}; --around N shows some, a pipe has all")


def _show_text(generations: Generations, args: argparse.Namespace) -> None:
    found = passages(_trajectory(generations, args))
    if args.json:
        write_json(each._asdict() for each in found)
    else:
        _write(_block(each) for each in found)


def _show_report(generations: Generations, args: argparse.Namespace) -> None:
    if args.json:
        write_json([_described(generations)])
        return
    _write(_head(generations))
    _write(["", *map(_node_line, generations.nodes()), ""])
    if generations.trajectories:
        chosen = passages(_trajectory(generations, args))
        _write(_block(each, _CHARACTERS_OF_A_TEXT) for each in chosen)


def _described(generations: Generations) -> Row:
    run_ = generations.run
    return {
        "key": run_.key.text,
        "reward": run_.reward,
        "info": dict(run_.info),
        "records": len(run_.records),
        "pending": run_.pending,
        "missing": run_.missing,
        "closed": run_.closed,
        "trajectories": [_summary(each) for each in generations.trajectories],
    }


def _summary(trajectory: Experience) -> dict[str, Any]:
    finish = trajectory.finish_reason
    return {
        "id": str(trajectory.eid),
        "reward": trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": len(trajectory.tokens),
        "prompt_tokens": trajectory.prompt_length,
        "trained_tokens": trained(trajectory),
        "weights": labels(trajectory.model_versions),
        "finish_reason": None if finish is None else finish.value,
    }


def _head(generations: Generations) -> Iterator[str]:
    run_, trajectories = generations.run, generations.trajectories
    reward = "no reward" if run_.reward is None else f"reward {run_.reward:g}"
    ends = counted(len(trajectories), "trajectory").replace("trajectorys", "trajectories")
    tokens = counted(sum(map(trained, trajectories)), "token")
    generated = counted(len(run_.records), "generation")
    yield f"{run_.key}   {reward}   {generated}   {ends}   {tokens} trained"
    if run_.pending:
        yield f"in flight: {run_.pending}"
    if run_.missing:
        yield f"incomplete: {pairs(run_.missing)}"
    if run_.info:
        yield f"info: {visible(pairs(run_.info))}"


def _node_line(node: Node) -> str:
    record = node.record
    fate = "superseded" if node.superseded else f"{counted(node.trained)} trained"
    facts = [
        f"{counted(record.prompt_end)} + {counted(record.response_count)} tokens",
        record.finish_reason.value,
        f"weights {labels(record.versions)}" if record.versions else "weights unknown",
        fate,
        *([] if record.reward is None else [f"reward {record.reward:g}"]),
        *record.flags,
        *([] if node.leaf is None else [f"● leaf {node.leaf}"]),
    ]
    return visible(f"{node.branches}{node.number}  " + "   ".join(facts))


def _block(passage: Passage, limit: int | None = None) -> str:
    """A text below what is known of it."""
    if passage.text is None:
        return f"── {passage.what}: no text is recorded\n"
    text = passage.text if limit is None else passage.text[:limit]
    left = len(passage.text) - len(text)
    more = f"\n… {counted(left, 'further character')}: --text" if left else ""
    return f"── {visible(passage.what)}\n{visible(text, lines=True)}{more}\n"


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")


_VIEWS: dict[str | None, Callable[[Generations, argparse.Namespace], None]] = {
    None: _show_report,
    "forest": _show_forest,
    "text": _show_text,
    "tokens": _show_tokens,
}
