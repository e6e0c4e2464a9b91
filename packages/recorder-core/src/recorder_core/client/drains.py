"""What a drain hands out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from recorder_core.client.calls import Call, DrainedPart, ack
from recorder_core.experience import Experience
from recorder_core.protocol import CountReply
from recorder_core.records import Record
from recorder_core.trajectories import Forest


class ServerLease(NamedTuple):
    """One server's promise to keep what it handed out."""

    url: str
    id: str


class DrainedRecords:
    """Records drained from one or many servers, until they are acknowledged."""

    def __init__(self, parts: Mapping[str, DrainedPart]) -> None:
        self.records: list[Record] = [each for part in parts.values() for each in part.records]
        """The records of all servers; of one server, parents come before what continues them."""
        self.pending: int = sum(part.pending for part in parts.values())
        """Generations under the prefix that were not finished: they are not among the records."""
        self.leases = tuple(ServerLease(url, part.lease) for url, part in parts.items())
        """What is acknowledged, per server."""

    @cached_property
    def _forest(self) -> Forest:
        return Forest(self.records)

    @cached_property
    def experiences(self) -> list[Experience]:
        """The records of all servers assembled together, on first use; see `assemble`."""
        return self._forest.experiences()

    @cached_property
    def superseded(self) -> list[Record]:
        """The records that `experiences` leaves out: retried, their answers not delivered."""
        return self._forest.superseded

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.records)} records of {len(self.leases)} server(s), "
            f"{self.pending} pending)"
        )

    def _acks(self) -> dict[str, Call[CountReply, int]]:
        return {lease.url: ack(lease.id) for lease in self.leases}
