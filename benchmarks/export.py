"""From recorded experiences to what trainers take, against making it of the texts again.

Of the trainers, those that are installed: `nox -s bench` runs this in the environment of each.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import Experience, assemble, export

PROMPT, RESPONSE = 512, 512


def installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


def rewarded(count: int) -> list[Experience]:
    """Experiences of 1,024 tokens, as one turn each."""
    records = generations.recorded([generations.single(PROMPT, RESPONSE) for _ in range(count)])
    return [each.replace(reward=1.0) for each in assemble(records)]


def steps(experiences: list[Experience], folder: Path) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; each from the same experiences or rows."""
    batch = export.group_advantages(export.rows(experiences))
    runs = list(batch.runs)
    found: dict[str, Callable[[], Any]] = {
        "rows": lambda: export.rows(experiences),
        "group_advantages": lambda: export.group_advantages(batch),
    }
    found["TRL rollout"] = lambda: export.trl.rollout(batch, runs)
    found["prime-rl"] = lambda: export.dicts.prime_rl(batch, env_name="bench")
    if installed("trl"):
        found["TRL samples"] = lambda: export.trl.rollout_samples(batch)
    if installed("verl"):
        found["verl DataProto"] = lambda: export.verl.dataproto(batch, pad_token_id=0)
        found["verl agent loops"] = lambda: export.verl.agent_loop_outputs(batch)
    if installed("skyrl"):
        found["SkyRL"] = lambda: export.skyrl.generator_output(batch, runs)
    if installed("torch"):
        from recorder_core.collate import collate_packed, collate_padded

        found["collate padded"] = lambda: collate_padded(batch, pad_token_id=0)
        found["collate packed"] = lambda: collate_packed(batch)
    if installed("pyarrow"):
        from recorder_core.export import parquet

        file = folder / "bench.parquet"
        parquet.write(file, experiences)
        found["Parquet write"] = lambda: parquet.write(file, experiences)
        found["Parquet read"] = lambda: list(parquet.read(file))
    if installed("transformers", "torch"):
        found["baseline: tokenise the texts, mask"] = from_text(len(experiences))
    return found


def from_text(count: int) -> Callable[[], list[Any]]:
    """What a trainer does with texts: prompt and response tokenised, the response masked in."""
    from transformers import AutoTokenizer

    from tests.models import tiny_qwen3_float32

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_float32())
    random = np.random.default_rng(0)
    ids = random.integers(10, 500, (2 * count, PROMPT)).tolist()
    texts = tokenizer.batch_decode(ids)
    pairs = list(zip(texts[:count], texts[count:], strict=True))

    def tokenise() -> list[Any]:
        made = []
        for prompt, response in pairs:
            first = tokenizer(prompt).input_ids
            second = tokenizer(response).input_ids
            made.append((first + second, [0] * len(first) + [1] * len(second)))
        return made

    return tokenise


def rates(name: str, samples: Sequence[float], count: int, size: int) -> list[Row]:
    """A step's samples, in microseconds for all, per experience and as a rate."""
    rows = [row(name, "µs each", [each / count for each in samples])]
    if not name.startswith(("group", "baseline")):
        rows.append(row(name, "MB/s", [size / each for each in samples]))
    return rows


def measure(quick: bool) -> list[Row]:
    count, repeats = (8, 2) if quick else (256, 15)
    experiences = rewarded(count)
    # Ids, logprobs and mask: what every trainer takes.
    size = sum(each.tokens.nbytes + 5 * each.response_length for each in experiences)
    with tempfile.TemporaryDirectory() as folder:
        timed = steps(experiences, Path(folder))
        samples: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(repeats):  # in turn: what disturbs one disturbs the others
            for name, step in timed.items():
                with no_gc():
                    samples[name].append(microseconds(step))
    progress(f"export: {count} experiences of {PROMPT + RESPONSE} tokens")
    return [each for name in timed for each in rates(name, samples[name], count, size)]


if __name__ == "__main__":
    main(__doc__, measure)
