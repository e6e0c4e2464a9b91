"""Drained runs in a folder, so that a scheduler that is killed loses none of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel

from recorder_core.codec import decode_runs, encode_stream
from recorder_core.errors import CodecError
from recorder_core.rollout.status import Metrics
from recorder_core.rollout.task import Task
from recorder_core.runs import Run


class Spooled(BaseModel):
    """What a file says before the run itself, in a line of JSON."""

    task: Task
    """The attempt that ended well."""
    metrics: Metrics
    unfinished: int


class Spool:
    """A file for each run that ended well, by batch, task and run: written, synced, renamed.

    Args:
        folder: Of one training job: a batch id that is used again means the same batch.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def put(self, asked: Task, spooled: Spooled, runs: Sequence[Run]) -> None:
        """Keep a run; it is on the disk when this returns.

        Args:
            asked: The run as it was submitted, before any retry.
            spooled: What became of it.
            runs: What it recorded.
        """
        path = self._path(asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(spooled.model_dump_json().encode() + b"\n")
            for frame in encode_stream(runs):
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def get(self, asked: Task) -> tuple[Spooled, list[Run]] | None:
        """A run that was kept; None if it was not, or not to its end."""
        try:
            line, _, stream = self._path(asked).read_bytes().partition(b"\n")
            return Spooled.model_validate_json(line), decode_runs(stream)
        except (FileNotFoundError, CodecError, ValueError):
            return None

    def drop(self, batch_id: str) -> None:
        """Forget a batch."""
        shutil.rmtree(self._folder / quote(batch_id, safe=""), ignore_errors=True)

    def _path(self, asked: Task) -> Path:
        batch, task = quote(asked.batch_id, safe=""), quote(asked.task_id, safe="")
        return self._folder / batch / task / f"{asked.run_id}.run"
