"""What the clients ask and how they read the answers; nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from recorder_core.codec import MEDIA_TYPE, decode_records, encode_records
from recorder_core.errors import BadRequestError, CodecError, ServerFaultError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import (
    LEASE_HEADER,
    PENDING_HEADER,
    AckRequest,
    BlockRequest,
    CountReply,
    DrainRequest,
    FlushReply,
    KeyReply,
    StatsReply,
    SweepRequest,
    UpdateReply,
    UpdateRequest,
    VersionRequest,
)
from recorder_core.records import Record
from recorder_core.trajectories import Forest

Result = TypeVar("Result")
Key = str | RecordKey
Prefix = str | RecordKey | KeyPrefix

_KEYS = TypeAdapter(list[KeyReply])


@dataclass(frozen=True)
class Call(Generic[Result]):
    """One request, and the rules for its replies."""

    method: str
    path: str
    """Below `/records`."""
    parse: Callable[[httpx.Response], Any]
    """Reads one server's good reply; raises ServerFaultError."""
    merge: Callable[[Mapping[str, Any]], Result]
    """Makes one result of what every server answered, by URL."""
    params: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    media_type: str = "application/json"
    repeatable: bool = True
    """Whether sending it twice does no more than sending it once."""
    wait_s: float = 0.0
    """Seconds that the server may take on purpose."""
    if_partial: str = "the others have done it; the call can be repeated"
    """For the error where some servers failed and others did not."""


class ServerLease(NamedTuple):
    """One server's promise to keep what it handed out."""

    url: str
    id: str


@dataclass(frozen=True, eq=False)
class Drained:
    """Records drained from one or many servers."""

    records: list[Record] = field(repr=False)
    """By key, all servers' together; of one server, parents come first."""
    pending: int
    """Generations under the prefix that were not finished: they are not among the records."""
    leases: tuple[ServerLease, ...]
    """What is to be acknowledged."""

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


def keys(prefix: Prefix) -> Call[list[KeyReply]]:
    """What is there under a prefix."""
    return Call("GET", "/keys", _json(_KEYS.validate_json), _merge_keys, _prefix(prefix))


def get(prefix: Prefix) -> Call[list[Record]]:
    """The records under a prefix."""
    return Call("GET", "", _records, _merge_records, _prefix(prefix))


def update(
    key: Key,
    reward: float | None,
    info: Mapping[str, Any] | None,
    record_ids: Iterable[str] | None,
    token_level_reward: Iterable[float] | None,
) -> Call[int]:
    """Write what a workflow knows after the run."""
    content = _body(
        UpdateRequest,
        key=_key(key),
        # Numpy's and torch's numbers become Python's.
        reward=None if reward is None else float(reward),
        info=info,
        record_ids=None if record_ids is None else list(record_ids),
        token_level_reward=(
            None if token_level_reward is None else [float(each) for each in token_level_reward]
        ),
    )
    parse = _json(UpdateReply.model_validate_json, "updated")
    return Call("PATCH", "", parse, _total, content=content)


def overwrite(key: Key, records: Iterable[Record]) -> Call[int]:
    """Replace all that a key has."""
    params, content = {"key": str(_key(key))}, encode_records(records)
    return Call("PUT", "", _count, _total, params, content, media_type=MEDIA_TYPE)


def delete(prefix: Prefix) -> Call[int]:
    """Delete the records under a prefix."""
    return Call("DELETE", "", _count, _total, _prefix(prefix))


def drain(prefix: Prefix, wait_s: float, lease_s: float) -> Call[Drained]:
    """Hand the records under a prefix out."""
    return Call(
        "POST",
        "/drain",
        _drained,
        _merge_drained,
        content=_body(DrainRequest, **_prefix(prefix), wait_s=wait_s, lease_s=lease_s),
        # A reply that is lost takes its records with it until the lease ends: asked again at
        # once, the server would say that there are none.
        repeatable=False,
        wait_s=wait_s,
        if_partial=f"what the others handed out comes back when their leases end, in {lease_s:g} s",
    )


def ack(lease: ServerLease) -> Call[int]:
    """Drained records are safe with the caller."""
    return Call("POST", "/ack", _count, _total, content=_body(AckRequest, lease=lease.id))


def block(prefix: Prefix) -> Call[None]:
    """Refuse records under a prefix."""
    return Call("POST", "/block", _none, _none, content=_body(BlockRequest, **_prefix(prefix)))


def sweep(older_than_s: float) -> Call[int]:
    """Delete old keys."""
    content = _body(SweepRequest, older_than_s=older_than_s)
    return Call("POST", "/sweep", _count, _total, content=content)


def set_version(version: str) -> Call[None]:
    """Tell the engine the label of its weights."""
    return Call("POST", "/version", _none, _none, content=_body(VersionRequest, version=version))


def flush() -> Call[bool]:
    """Wait until what has finished is stored."""
    parse = _json(FlushReply.model_validate_json, "flushed")
    return Call("POST", "/flush", parse, lambda parts: all(parts.values()))


def stats() -> Call[dict[str, StatsReply]]:
    """Counters of recorder and store."""
    return Call("GET", "/stats", _json(StatsReply.model_validate_json), dict)


def _key(key: Key) -> RecordKey:
    return key if isinstance(key, RecordKey) else RecordKey.parse(key)


def _prefix(prefix: Prefix) -> dict[str, str]:
    return {"prefix": str(KeyPrefix(str(prefix)))}


def _body(model: type[BaseModel], **fields: Any) -> bytes:
    # What was not given is not sent: an older server may not know the field.
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return model(**given).model_dump_json(exclude_unset=True).encode()
    except ValueError as error:
        faults = described(error.errors()) if isinstance(error, ValidationError) else error
        raise BadRequestError(f"not sent, as the server would refuse it: {faults}") from None


def described(faults: Sequence[Any]) -> str:
    """Pydantic's list of errors, as a server shows it too, in one line."""
    lines = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
    return "; ".join(lines)


def _json(read: Callable[[bytes], Any], name: str = "") -> Callable[[httpx.Response], Any]:
    """Reads a JSON reply, or one field of it."""

    def parse(response: httpx.Response) -> Any:
        try:
            reply = read(response.content)
        except ValidationError as error:
            raise _strange(response, error) from error
        return getattr(reply, name) if name else reply

    return parse


_count = _json(CountReply.model_validate_json, "records")


def _records(response: httpx.Response) -> list[Record]:
    try:
        return decode_records(response.content)
    except CodecError as error:
        raise _strange(response, error) from error


def _drained(response: httpx.Response) -> tuple[str, int, list[Record]]:
    headers, records = response.headers, _records(response)
    try:
        return headers[LEASE_HEADER], int(headers[PENDING_HEADER]), records
    except (KeyError, ValueError) as error:
        raise _strange(response, f"lease or pending header: {error!r}") from error


def _strange(response: httpx.Response, why: object) -> ServerFaultError:
    kind = response.headers.get("content-type", "untyped")
    return ServerFaultError(
        f"answered {response.status_code} with {len(response.content)} {kind} bytes, which is not "
        f"what /records answers; is something else at this address, or a proxy between? ({why})"
    )


def _none(_: object) -> None:
    return None


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _merge_records(parts: Mapping[str, list[Record]]) -> list[Record]:
    # The sort is stable: parents stay before what continues them.
    return sorted((each for part in parts.values() for each in part), key=lambda each: each.key)


def _merge_drained(parts: Mapping[str, tuple[str, int, list[Record]]]) -> Drained:
    return Drained(
        records=_merge_records({url: records for url, (_, _, records) in parts.items()}),
        pending=sum(pending for _, pending, _ in parts.values()),
        leases=tuple(ServerLease(url, lease) for url, (lease, _, _) in parts.items()),
    )


def _merge_keys(parts: Mapping[str, list[KeyReply]]) -> list[KeyReply]:
    merged: dict[RecordKey, KeyReply] = {}
    for reply in (each for part in parts.values() for each in part):
        other = merged.get(reply.key)
        if other is not None:
            added = ("records", "rewarded", "pending", "bytes")
            update = {name: getattr(reply, name) + getattr(other, name) for name in added}
            # Where nothing is stored yet, there is no age.
            ages = [each.age_s for each in (reply, other) if each.records]
            reply = reply.model_copy(update={**update, "age_s": min(ages, default=0.0)})
        merged[reply.key] = reply
    return [merged[key] for key in sorted(merged)]
