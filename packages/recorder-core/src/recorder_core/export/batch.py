"""The normal form: rows, the runs that they belong to, and what became of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from recorder_core.arrays import AnyArray
from recorder_core.errors import ExportError
from recorder_core.experience import Experience
from recorder_core.export.report import Report

Status = Literal["completed", "truncated", "aborted"]
"""How a trajectory ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory as every trainer can take it.

    All arrays are [T], unshifted: the value at an index belongs to the token at that index. They
    may share memory with the experience.
    """

    experience: Experience = field(repr=False)
    """What the row was made from."""
    tokens: npt.NDArray[np.int32] = field(repr=False)
    """int32 [T]: the first prompt, then the response region."""
    prompt_length: int
    """Tokens of the first prompt."""
    mask: npt.NDArray[np.bool_] = field(repr=False)
    """bool [T]: sampled by the model and to be trained; each such token has a logprob."""
    logprobs: npt.NDArray[np.float32] = field(repr=False)
    """float32 [T]: what the engine recorded; 0.0 where there is none, never NaN."""
    versions: npt.NDArray[np.int64] = field(repr=False)
    """int64 [T]: the weights that sampled the token; -1: nobody did, or not known."""
    temperature: float | None
    """Of the trained tokens; None: not recorded, or, where that was allowed, mixed."""
    group: str
    """`<batch>/<task>`: the runs that are compared with one another."""
    run: str
    """The record key."""
    index: int
    """Which of the run's rows in the batch this is."""
    reward: float | None
    """The run's."""
    advantage: float | None
    """The run's; None until `group_advantages`."""
    status: Status

    @property
    def length(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def trained_tokens(self) -> int:
        """Tokens to be trained."""
        return int(np.count_nonzero(self.mask))

    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest weights among the trained tokens; None where there are none.

        Raises:
            ExportError: The weights of a trained token are not known.
        """
        versions = self.versions[self.mask]
        if not len(versions):
            return None
        if versions.min() < 0:
            labels = {span.version for span in self.experience.model_versions}
            raise ExportError(
                f"{self.experience.eid} has trained tokens whose version is not known; its labels "
                f"are {sorted(labels)}: set labels such as '12' or 'v12' on the engine, or pass "
                "Rules(version=a function that makes a label a number)"
            )
        return int(versions.min()), int(versions.max())

    def routed(self, rows: int) -> tuple[AnyArray, npt.NDArray[np.bool_]] | None:
        """The experts that routed each token, as far as the engine gave them.

        Args:
            rows: How many rows the trainer wants: T, or T - 1; the last token's row, which the
                engine never computes, is zero.

        Returns:
            Expert ids, uint8 or uint16 [rows, layers, top_k], zero where not valid, and which rows
            are valid, bool [rows]; None if the engine gave no experts.
        """
        given = self.experience.routed_experts
        if given is None:
            return None
        data = np.zeros((rows, *given.data.shape[1:]), dtype=given.data.dtype)
        valid = np.zeros(rows, dtype=np.bool_)
        for begin, end in given.valid_ranges:
            data[begin:end] = given.data[begin - given.start : end - given.start]
            valid[begin:end] = True
        return data, valid


@dataclass(frozen=True, slots=True)
class Run:
    """A run of which trajectories were given, whether or not a row of it is left."""

    key: str
    group: str
    reward: float | None
    """None where it has no finite one."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in the order of the experiences that they were made from."""

    rows: tuple[Row, ...] = field(repr=False)
    runs: dict[str, Run] = field(repr=False)
    """Every run that was given, by key: the baseline is taken over these."""
    report: Report

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    @cached_property
    def by_run(self) -> dict[str, list[Row]]:
        """The rows of each run that has some."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.run, []).append(row)
        return found

    @cached_property
    def by_group(self) -> dict[str, list[str]]:
        """The keys of each group's runs, those without a row included."""
        found: dict[str, list[str]] = {}
        for run in self.runs.values():
            found.setdefault(run.group, []).append(run.key)
        return found

    @property
    def temperature(self) -> float | None:
        """The one temperature at which all was sampled, which the trainer has to be told.

        None where nothing was recorded.

        Raises:
            ExportError: There are several.
        """
        found = {row.temperature for row in self.rows if row.trained_tokens}
        if len(found) > 1:
            raise ExportError(f"the rows were sampled at several temperatures: {found}")
        return found.pop() if found else None
