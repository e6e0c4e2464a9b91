"""Shows what was recorded: a table, one trajectory token by token, a training batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from recorder_core import Experience, RecorderStats, Run, encode_runs
from recorder_core.collate import collate_padded

FILE = Path(__file__).resolve().parents[1] / "demo.rec"
"""What a demo has recorded, for `make view-demo`."""


def conclude(
    runs: Sequence[Run],
    experiences: Sequence[Experience],
    stats: RecorderStats,
    model: Path,
    console: Console,
) -> None:
    """Print what became of all generations, write the runs to `FILE`, say how to look at them."""
    console.print(
        f"\n{stats.started} generations: {stats.recorded} recorded ({stats.roots} roots, "
        f"{stats.extended} that continue one), {sum(stats.dropped.values())} dropped, "
        f"{stats.pending} pending; {stats.prefix_break} prefix breaks"
    )
    rewards = [each.reward for each in experiences if each.reward is not None]
    console.print(f"Mean reward {sum(rewards) / len(rewards):.2f}. What was started is stopped.")
    FILE.write_bytes(encode_runs(runs))
    console.print("\nLook at it in a browser: make view-demo, or")
    console.print(f"  recorder view {FILE} --tokenizer {model} --open", soft_wrap=True)


def show(
    experiences: list[Experience], tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Print the three views."""
    console.print(_table(experiences))
    longest = max(experiences, key=lambda each: (len(each.turns), each.reward or 0.0))
    console.print(f"\n[bold]{longest.eid.key}[/], token by token")
    console.print(_legend())
    console.print(_tokens(longest, tokenizer))
    _batch(experiences, tokenizer, console)


def _table(experiences: list[Experience]) -> Table:
    table = Table(title=f"{len(experiences)} trajectories recorded")
    table.add_column("key", no_wrap=True)
    for name in ("turns", "prompt", "response", "sampled", "mean logprob"):
        table.add_column(name, justify="right")
    table.add_column("weights")
    table.add_column("finish")
    table.add_column("reward", justify="right")
    for each in experiences:
        mask = each.action_mask
        sampled = each.logprobs[mask] if mask.any() else np.array([np.nan])
        table.add_row(
            str(each.eid.key),
            str(len(each.turns)),
            str(each.prompt_length),
            str(each.response_length),
            str(int(mask.sum())),
            f"{sampled.mean():.3f}",
            each.model_version or "-",
            each.finish_reason.value,
            "-" if each.reward is None else f"{each.reward:.1f}",
        )
    return table


def _legend() -> Text:
    return Text.assemble(
        ("prompt", "dim"),
        "  ",
        ("sampled, trained (logprob below)", "green"),
        "  ",
        ("in between, not sampled", "yellow"),
    )


def _tokens(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> Table:
    table = Table(box=None, padding=(0, 2))
    for name in ("position", "id", "token", "mask", "logprob"):
        table.add_column(name, justify="left" if name == "token" else "right")
    # The end of the prompt is enough to see where the response begins.
    first = max(experience.prompt_length - 4, 0)
    for position in range(first, len(experience.tokens)):
        token = int(experience.tokens[position])
        index = position - experience.prompt_length
        in_response = index >= 0
        trained = in_response and bool(experience.action_mask[index])
        logprob = float(experience.logprobs[index]) if in_response else float("nan")
        table.add_row(
            str(position),
            str(token),
            Text(repr(tokenizer.decode([token]))),
            str(int(trained)) if in_response else "",
            "" if np.isnan(logprob) else f"{logprob:.3f}",
            style="green" if trained else "yellow" if in_response else "dim",
        )
    return table


def _batch(
    experiences: list[Experience], tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    batch = collate_padded(experiences, pad_token_id=tokenizer.pad_token_id or 0)
    console.print("\n[bold]A padded training batch[/]")
    for name in ("tokens", "attention_mask", "action_mask", "logprobs", "rewards", "version_index"):
        tensor = getattr(batch, name)
        console.print(f"  {name:15} {tensor.dtype!s:14} {list(tensor.shape)}")
    console.print(f"  {'versions':15} {batch.versions}")
