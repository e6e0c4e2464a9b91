"""The bodies of the `/records` HTTP interface, shared by the server and the client."""

from __future__ import annotations

import json
from numbers import Integral
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    model_validator,
)
from typing_extensions import Self

from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.recorder import RecorderStats
from recorder_core.stores import StoreStats

PREFIX = "/records"

NOT_SAVED = 507
"""The status of a call that is in effect, but not on the store's disk."""

KEY_HEADER = "x-record-key"
"""On a generation request: the record key, when it cannot be the API key."""

MAX_WAIT_S = 600.0
MAX_LEASE_S = 7 * 24 * 3600.0
DEFAULT_LEASE_S = 600.0
MAX_BODY_BYTES = 2 * 1024**2
"""The most that a JSON body may have: it is read within milliseconds, on the event loop."""
MAX_RUNS_AS_JSON = 1_000
MAX_KEYS = 10_000
"""The most keys of one reply; further ones are asked for with `after`."""
MAX_RUNS = 256
"""The most runs of one lease: to hand them out, or to take them back, takes milliseconds."""

MAX_PREFIXES = 1_000
"""The most prefixes of one call that forgets them: that takes milliseconds."""
MAX_RECENT = 10_000
"""The most entries of one reply on what finished lately."""
MAX_PIECES = 20_000
"""The most token ids of one call: to read and to answer them takes milliseconds."""

MAX_JSON_DEPTH = 32
"""How deep workflow notes may nest: what is taken in can always be written out again."""
_MAX_IDS = 10_000


def _nests_within(value: Any, limit: int) -> bool:
    """Whether a JSON value nests at most `limit` lists and objects deep."""
    if isinstance(value, dict):
        return limit > 0 and all(_nests_within(each, limit - 1) for each in value.values())
    if isinstance(value, list):
        return limit > 0 and all(_nests_within(each, limit - 1) for each in value)
    return True


def _writable(info: dict[str, Any]) -> dict[str, Any]:
    if not _nests_within(info, MAX_JSON_DEPTH):
        raise ValueError(f"info nests deeper than {MAX_JSON_DEPTH} levels")
    if not _has_small_integers(info):
        raise ValueError("info holds an integer of more than 64 bits; write it as text")
    # NaN and lone surrogates could never be read back.
    json.dumps(info, ensure_ascii=False, allow_nan=False).encode()
    return info


def _has_small_integers(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_has_small_integers, value.values()))
    if isinstance(value, list):
        return all(map(_has_small_integers, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**64


Info = Annotated[dict[str, JsonValue], AfterValidator(_writable)]
"""A workflow's own notes: what JSON holds, of limited depth."""


def _checked_prefix(text: str) -> str:
    KeyPrefix(text)
    return text


PrefixText = Annotated[str, AfterValidator(_checked_prefix)]
"""Leading components of record keys; the empty text stands for all keys."""


def selection(prefix: str | None, key: str | RecordKey | None) -> Selection:
    """What is meant by a prefix or a whole key.

    Raises:
        InvalidKeyError: The text is none.
        ValueError: Both are given, or neither.
    """
    if (prefix is None) is (key is None):
        raise ValueError("give either key, for one run, or prefix, for all runs below it")
    if key is not None:
        return key if isinstance(key, RecordKey) else RecordKey.parse(key)
    return KeyPrefix(prefix or "")


def _version_text(value: object) -> object:
    # What trainers count in; True is no number of theirs, and 7.0 no spelling of 7.
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(value)
    return value


VersionLabel = Annotated[
    str,
    Field(min_length=1, max_length=256),
    BeforeValidator(_version_text, json_schema_input_type=str | int),
]
"""A label of weights; an integer is taken and written as text."""


class _Body(BaseModel):
    # A misspelt field is an error, not a reward that silently went nowhere.
    model_config = ConfigDict(extra="forbid")


class _Selecting(_Body):
    prefix: PrefixText | None = None
    """Leading components of record keys; the empty text stands for all keys."""
    key: RecordKey | None = None
    """One run, and no longer key that begins so."""

    @property
    def where(self) -> Selection:
        """What is meant."""
        return selection(self.prefix, self.key)

    @model_validator(mode="after")
    def _selects(self) -> Self:
        _ = self.where
        return self


class UpdateRequest(_Body):
    """`PATCH /records`: what the workflow knows after the run."""

    key: RecordKey
    sample_ids: list[str | tuple[str, int]] | None = Field(default=None, max_length=_MAX_IDS)
    """Only these generations: record ids, or the `id` of an API's reply, with the index of one of
    its choices where only that is meant. Null means the run: generations that end later too."""
    reward: FiniteFloat | None = None
    info: Info | None = None
    token_level_reward: list[FiniteFloat] | None = None
    """One value per response token of each generation selected."""


class UpdateReply(BaseModel):
    """What an update did."""

    updated: int
    """Generations that have the values now."""
    unknown: list[str | tuple[str, int]] = []
    """Of `sample_ids`: those that stand for no generation of the run."""


class CountReply(BaseModel):
    """How many records the call concerned."""

    records: int


class DrainRequest(_Selecting):
    """`POST /records/drain`: hand runs out."""

    lease: str | None = Field(default=None, min_length=1, max_length=256)
    """The caller's own, unique name for it: asked again with the same, the answer is the same."""
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for generations in flight there."""
    lease_s: float = Field(default=DEFAULT_LEASE_S, gt=0, le=MAX_LEASE_S)
    """Seconds after which the runs come back unless acknowledged."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Take whole runs until they come to so much memory, but at least one; never more than
    `MAX_RUNS`. The reply says whether there are more."""


class LeaseRequest(_Body):
    """`POST /records/ack` or `/records/release`: the drained runs are safe, or are given back."""

    lease: str


class ExtendRequest(LeaseRequest):
    """`POST /records/extend`: a lease's time begins anew."""

    lease_s: float = Field(default=DEFAULT_LEASE_S, gt=0, le=MAX_LEASE_S)


class BlockRequest(_Selecting):
    """`POST /records/block`: refuse records there from now on."""


class ForgetRequest(_Body):
    """`POST /records/forget`: delete what is there, and refuse what comes late."""

    prefixes: list[PrefixText] = Field(max_length=MAX_PREFIXES)
    """The empty text stands for all keys."""


class SweepRequest(_Body):
    """`POST /records/sweep`: delete runs that nothing was added to for so long."""

    older_than_s: float = Field(ge=0)


class VersionRequest(_Body):
    """`POST /records/version`: the label of the weights that sample from now on."""

    version: VersionLabel


class PiecesRequest(_Body):
    """`POST /records/pieces`: what tokens are as bytes."""

    ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=MAX_PIECES)
    """Token ids, each of them once."""


class PiecesReply(BaseModel):
    """What tokens are as bytes."""

    pieces: list[str]
    """Of each id its bytes, in base64; empty where the vocabulary has no such id."""


class FlushReply(BaseModel):
    """Whether everything that had finished is stored now."""

    flushed: bool


class KeyReply(BaseModel):
    """What the server has of one run."""

    key: RecordKey
    records: int = 0
    rewarded: int = 0
    """Records that have a reward, their own or the run's."""
    reward: float | None = None
    """The run's own."""
    pending: int = 0
    """Generations in flight."""
    missing: dict[str, int] = {}
    """Generations that the run had and that are not here, by reason: dropped or evicted."""
    bytes: int = 0
    age_s: float = 0.0
    """Seconds since a record was last added."""
    closed: bool = False
    """Whether later generations are refused."""


class StatsReply(BaseModel):
    """`GET /records/stats`."""

    recorder: RecorderStats
    store: StoreStats
