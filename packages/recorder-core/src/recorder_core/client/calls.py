"""What the clients ask and how they read the answers; nothing is sent here.

A `Call` is one request below `/records`, with the rules for its replies: how one is parsed, how
those of several servers become one result, and whether it may be sent again. `RecordClient` and
`AsyncRecordClient` only carry calls out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from recorder_core.codec import MEDIA_TYPE, decode_records, encode_records
from recorder_core.errors import BadRequestError, ClientError, CodecError, ServerFaultError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import (
    LEASE_HEADER,
    PENDING_HEADER,
    PREFIX,
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

Part = TypeVar("Part")
Whole = TypeVar("Whole")
Key = str | RecordKey
Prefix = str | RecordKey | KeyPrefix

_FIRST_PAUSE_S = 0.1
_KEYS = TypeAdapter(list[KeyReply])


@dataclass(frozen=True)
class Call(Generic[Part, Whole]):
    """One request, and the rules for its replies."""

    method: str
    path: str
    """Below the server's base URL."""
    parse: Callable[[httpx.Response], Part]
    """Reads one server's successful reply; raises ClientError."""
    merge: Callable[[Mapping[str, Part]], Whole]
    """Makes one result of the servers' parts, by URL."""
    params: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    media_type: str = "application/json"
    repeatable: bool = True
    """Whether sending it twice does no more than sending it once."""
    wait_s: float = 0.0
    """Seconds that the server may take on purpose."""
    if_partial: str = "the others have done it; the call can be repeated"
    """For the error when some servers failed and others did not."""

    def pauses(self, retries: int) -> Iterator[float]:
        """Seconds to wait before each retry."""
        return (_FIRST_PAUSE_S * 2**n for n in range(retries if self.repeatable else 0))


@dataclass(frozen=True)
class DrainedPart:
    """What one server handed out."""

    lease: str
    pending: int
    records: list[Record]


def keys(prefix: Prefix) -> Call[list[KeyReply], list[KeyReply]]:
    """What is there under a prefix."""
    return Call("GET", f"{PREFIX}/keys", _key_list, _merge_keys, params=_prefix(prefix))


def get(prefix: Prefix) -> Call[list[Record], list[Record]]:
    """The records under a prefix."""
    return Call("GET", PREFIX, _records, _merge_records, params=_prefix(prefix))


def update(
    key: Key,
    reward: float | None,
    info: Mapping[str, Any] | None,
    record_ids: Iterable[str] | None,
    token_level_reward: Iterable[float] | None,
) -> Call[UpdateReply, int]:
    """Write what a workflow knows after the run."""
    body = _body(
        UpdateRequest,
        key=_key(key),
        # Numpy's numbers and torch's become Python's.
        reward=None if reward is None else float(reward),
        info=None if info is None else dict(info),
        record_ids=None if record_ids is None else list(record_ids),
        token_level_reward=(
            None if token_level_reward is None else [float(each) for each in token_level_reward]
        ),
    )
    return Call("PATCH", PREFIX, _json(UpdateReply), _sum("updated"), content=body)


def overwrite(key: Key, records: Iterable[Record]) -> Call[CountReply, int]:
    """Replace all that a key has."""
    return Call(
        "PUT",
        PREFIX,
        _json(CountReply),
        _sum("records"),
        params={"key": _key(key).text},
        content=encode_records(records),
        media_type=MEDIA_TYPE,
    )


def delete(prefix: Prefix) -> Call[CountReply, int]:
    """Delete the records under a prefix."""
    return Call("DELETE", PREFIX, _json(CountReply), _sum("records"), params=_prefix(prefix))


def drain(
    prefix: Prefix, wait_s: float, lease_s: float
) -> Call[DrainedPart, dict[str, DrainedPart]]:
    """Hand the records under a prefix out."""
    body = _body(DrainRequest, **_prefix(prefix), wait_s=wait_s, lease_s=lease_s)
    return Call(
        "POST",
        f"{PREFIX}/drain",
        _drained,
        dict,
        content=body,
        # A reply that is lost takes its records with it until the lease ends; asked again at
        # once, the server would say that there are none.
        repeatable=False,
        wait_s=wait_s,
        if_partial=f"what the others handed out comes back when their leases end, in {lease_s:g} s",
    )


def ack(lease: str) -> Call[CountReply, int]:
    """Drained records are safe with the caller."""
    return Call(
        "POST",
        f"{PREFIX}/ack",
        _json(CountReply),
        _sum("records"),
        content=_body(AckRequest, lease=lease),
    )


def block(prefix: Prefix) -> Call[None, None]:
    """Refuse records under a prefix."""
    return Call(
        "POST", f"{PREFIX}/block", _nothing, _none, content=_body(BlockRequest, **_prefix(prefix))
    )


def sweep(older_than_s: float) -> Call[CountReply, int]:
    """Delete old keys."""
    body = _body(SweepRequest, older_than_s=older_than_s)
    return Call("POST", f"{PREFIX}/sweep", _json(CountReply), _sum("records"), content=body)


def set_version(version: str) -> Call[None, None]:
    """Tell the engine the label of its weights."""
    body = _body(VersionRequest, version=version)
    return Call("POST", f"{PREFIX}/version", _nothing, _none, content=body)


def flush() -> Call[FlushReply, bool]:
    """Wait until what has finished is stored."""
    return Call("POST", f"{PREFIX}/flush", _json(FlushReply), _all_flushed)


def stats() -> Call[StatsReply, dict[str, StatsReply]]:
    """Counters of recorder and store."""
    return Call("GET", f"{PREFIX}/stats", _json(StatsReply), dict)


def _key(key: Key) -> RecordKey:
    return key if isinstance(key, RecordKey) else RecordKey.parse(key)


def _prefix(prefix: Prefix) -> dict[str, str]:
    return {"prefix": str(KeyPrefix(str(prefix)))}


def _body(model: type[BaseModel], **fields: Any) -> bytes:
    # What was not given is not sent: an older server may not know the field.
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return model(**given).model_dump_json(exclude_unset=True).encode()
    except ValidationError as error:
        faults = "; ".join(f"{_dotted(each['loc'])}: {each['msg']}" for each in error.errors())
        raise BadRequestError(f"not sent, as the server would refuse it: {faults}") from None


def _dotted(location: Iterable[Any]) -> str:
    return ".".join(str(part) for part in location)


Model = TypeVar("Model", bound=BaseModel)


def _json(model: type[Model]) -> Callable[[httpx.Response], Model]:
    def parse(response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise _strange(response, error) from error

    return parse


def _key_list(response: httpx.Response) -> list[KeyReply]:
    try:
        return _KEYS.validate_json(response.content)
    except ValidationError as error:
        raise _strange(response, error) from error


def _records(response: httpx.Response) -> list[Record]:
    if response.headers.get("content-type") != MEDIA_TYPE:
        raise _strange(response, f"its content type is not {MEDIA_TYPE}")
    try:
        return decode_records(response.content)
    except CodecError as error:
        raise _strange(response, error) from error


def _drained(response: httpx.Response) -> DrainedPart:
    records = _records(response)
    try:
        lease, pending = response.headers[LEASE_HEADER], int(response.headers[PENDING_HEADER])
    except (KeyError, ValueError) as error:
        raise _strange(response, f"its lease or pending header: {error!r}") from error
    return DrainedPart(lease, pending, records)


def _nothing(response: httpx.Response) -> None:
    if response.status_code != 204:
        raise _strange(response, "status 204 was expected")


def _strange(response: httpx.Response, why: object) -> ClientError:
    kind = response.headers.get("content-type", "untyped")
    return ServerFaultError(
        f"answered {response.status_code} with {len(response.content)} {kind} bytes that are not "
        f"what /records answers ({why}); is something else at this address, or a proxy between?"
    )


def _sum(name: str) -> Callable[[Mapping[str, BaseModel]], int]:
    return lambda parts: sum(getattr(part, name) for part in parts.values())


def _none(parts: Mapping[str, None]) -> None:
    return None


def _all_flushed(parts: Mapping[str, FlushReply]) -> bool:
    return all(part.flushed for part in parts.values())


def _merge_records(parts: Mapping[str, list[Record]]) -> list[Record]:
    # The sort is stable: parents stay before what continues them.
    return sorted((each for part in parts.values() for each in part), key=lambda each: each.key)


def _merge_keys(parts: Mapping[str, list[KeyReply]]) -> list[KeyReply]:
    by_key: dict[RecordKey, list[KeyReply]] = {}
    for part in parts.values():
        for reply in part:
            by_key.setdefault(reply.key, []).append(reply)
    return [
        KeyReply(
            key=key,
            records=sum(each.records for each in replies),
            rewarded=sum(each.rewarded for each in replies),
            pending=sum(each.pending for each in replies),
            bytes=sum(each.bytes for each in replies),
            # A server with nothing stored yet knows no age.
            age_s=min((each.age_s for each in replies if each.records), default=0.0),
        )
        for key, replies in sorted(by_key.items())
    ]
