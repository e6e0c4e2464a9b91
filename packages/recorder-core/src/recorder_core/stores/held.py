"""What a store holds, and what it tells of its changes to one who keeps them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recorder_core.keys import RecordKey
from recorder_core.keytree import Selection
from recorder_core.records import Record
from recorder_core.runs import Run


class Held(Run):
    """A run in the store, or the part of it that a lease holds.

    Args:
        run: The run.
        epoch: Its number, which no other has or had.
        now: When a record was last added, in seconds.
    """

    __slots__ = ("bytes", "epoch", "last_write", "lease")

    def __init__(self, run: Run, epoch: int, now: float) -> None:
        # Records in a dictionary of its own: the other may have been handed out.
        super().__init__(
            run.key,
            run.records.values(),
            reward=run.reward,
            info=run.info,
            dropped=run.dropped,
            evicted=run.evicted,
        )
        self.bytes = run.nbytes
        self.epoch = epoch
        self.last_write = now
        self.lease: str | None = None

    def copy(self, *, closed: bool) -> Run:
        """As it is now, whatever becomes of it later."""
        return Run(
            self.key,
            list(self.records.values()),
            reward=self.reward,
            info=self.info,
            dropped=self.dropped,
            evicted=self.evicted,
            closed=closed,
        )


@dataclass(slots=True)
class Leased:
    """What a lease holds."""

    where: Selection
    runs: dict[RecordKey, Held]
    lease_s: float
    expires_at: float
    more: bool


class Journal:
    """Is told of each change to what a store holds, under the store's lock; this one keeps none."""

    __slots__ = ()

    def run(self, run: Held) -> None:
        """A run is new, or its own values are others; its records are told of one by one."""

    def added(self, run: Held, record: Record) -> None:
        """A run has a record more."""

    def learnt(self, run: Held, record: Record) -> None:
        """More is known of a record that the run has."""

    def deleted(self, run: Held) -> None:
        """A run is gone, with its records."""

    def joined(self, parts: Sequence[Held], whole: Held) -> None:
        """Parts of a run, the older first, are one now; of a record in both the later counts."""

    def lease(self, name: str, leased: Leased | None) -> None:
        """A lease is open, or its time began anew; None: it is over."""

    def acknowledged(self, lease: str) -> None:
        """A lease's name is used up."""

    def blocked(self, where: Selection) -> None:
        """Records there are refused from now on."""

    def gone(self, key: RecordKey, run: Run | None) -> None:
        """What is known to be missing of a run that is not here; None: nothing any more."""
