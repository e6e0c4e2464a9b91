"""The bodies of the `/records` HTTP interface, shared by the server and the client."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.recorder import RecorderStats
from recorder_core.records import Info
from recorder_core.stores import StoreStats

PREFIX = "/records"

LEASE_HEADER = "x-record-lease"
"""On a drain's reply: the lease to acknowledge."""
PENDING_HEADER = "x-record-pending"
"""On a drain's reply: generations under the prefix that were not finished."""
KEY_HEADER = "x-record-key"
"""On a generation request: the record key, when it cannot be the API key."""

MAX_WAIT_S = 600.0
MAX_LEASE_S = 7 * 24 * 3600.0
DEFAULT_LEASE_S = 600.0


def _checked_prefix(text: str) -> str:
    KeyPrefix(text)
    return text


PrefixText = Annotated[str, AfterValidator(_checked_prefix)]
"""Leading components of record keys; the empty text stands for all keys."""


class _Body(BaseModel):
    # A misspelt field is an error, not a reward that silently went nowhere.
    model_config = ConfigDict(extra="forbid")


class UpdateRequest(_Body):
    """`PATCH /records`: what the workflow knows after the run."""

    key: RecordKey
    record_ids: list[str] | None = None
    """Only these records; null means all that the key has now."""
    reward: FiniteFloat | None = None
    info: Info | None = None
    token_level_reward: list[FiniteFloat] | None = None
    """One value per response token of each record selected."""


class UpdateReply(BaseModel):
    """How many records were updated."""

    updated: int


class CountReply(BaseModel):
    """How many records the call concerned."""

    records: int


class DrainRequest(_Body):
    """`POST /records/drain`: hand the records under a prefix out."""

    prefix: PrefixText
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for generations in flight under the prefix."""
    lease_s: float = Field(default=DEFAULT_LEASE_S, gt=0, le=MAX_LEASE_S)
    """Seconds after which the records come back unless acknowledged."""


class AckRequest(_Body):
    """`POST /records/ack`: the drained records are safe with the caller."""

    lease: str


class BlockRequest(_Body):
    """`POST /records/block`: refuse records under a prefix from now on."""

    prefix: PrefixText


class SweepRequest(_Body):
    """`POST /records/sweep`: delete keys that nothing was added to for so long."""

    older_than_s: float = Field(ge=0)


class VersionRequest(_Body):
    """`POST /records/version`: the label of the weights that sample from now on."""

    version: str = Field(min_length=1, max_length=256)


class FlushReply(BaseModel):
    """Whether everything that had finished is stored now."""

    flushed: bool


class KeyReply(BaseModel):
    """What the server has under one key."""

    key: RecordKey
    records: int
    rewarded: int
    pending: int
    """Generations in flight."""
    bytes: int
    age_s: float
    """Seconds since a record was last added."""


class StatsReply(BaseModel):
    """`GET /records/stats`."""

    recorder: RecorderStats
    store: StoreStats
