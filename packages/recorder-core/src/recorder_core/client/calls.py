"""What the clients ask and how they read the answers; nothing is sent here."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError

from recorder_core.codec import MEDIA_TYPE, Head, encode_runs
from recorder_core.drained import ServerLease
from recorder_core.errors import BadRequestError, ServerFaultError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.keytree import Selection
from recorder_core.protocol import (
    BlockRequest,
    CountReply,
    DrainRequest,
    ExtendRequest,
    FlushReply,
    ForgetRequest,
    KeyReply,
    LeaseRequest,
    PiecesReply,
    PiecesRequest,
    StatsReply,
    SweepRequest,
    UpdateReply,
    UpdateRequest,
    VersionRequest,
)
from recorder_core.recent import News
from recorder_core.records import Record
from recorder_core.runs import Run, SampleId, merged_by_key

Result = TypeVar("Result")

_KEYS = TypeAdapter(list[KeyReply])
_NEWS = msgspec.json.Decoder(News)

RECENT_ENTRIES = 2_000
"""Of a page of what happened lately: encoding one takes a server some milliseconds."""


class Stream(NamedTuple):
    """A reply that was decoded as it came."""

    head: Head
    runs: list[Run]


@dataclass(frozen=True)
class Call(Generic[Result]):
    """One request, and the rules for its replies."""

    method: str
    path: str
    """Below `/records`."""
    parse: Callable[[Any], Any]
    """Reads one server's good reply, a response or a stream; raises ServerFaultError."""
    merge: Callable[[Mapping[str, Any]], Result]
    """Makes one result of what every server answered, by URL."""
    params: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    media_type: str = "application/json"
    streamed: bool = False
    """Whether the reply is a stream of runs."""
    wait_s: float = 0.0
    """Seconds that the server may take on purpose."""
    if_partial: str = "the others have done it; the call can be repeated"
    """For the error where some servers failed and others did not."""


def keys(
    where: Selection, after: RecordKey | None, limit: int
) -> Call[Mapping[str, list[KeyReply]]]:
    """What is there, a page of it, by the server's URL."""
    params = {**_where(where), "limit": str(limit)}
    params |= {} if after is None else {"after": after.text}
    return Call("GET", "/keys", _json(_KEYS.validate_json), dict, params)


def runs(where: Selection, *, drained: bool = False) -> Call[list[Run]]:
    """The runs that are selected; with what was drained of them and is still remembered."""
    params = {**_where(where), **({"recent": "true"} if drained else {})}
    return Call("GET", "", _given, _merge_runs, params, streamed=True)


def recent(after: str, wait_s: float) -> Call[Mapping[str, News]]:
    """What happened lately, by the server's URL."""
    params = {"after": after, "limit": str(RECENT_ENTRIES), "wait_s": f"{wait_s:g}"}
    return Call("GET", "/recent", _json(_NEWS.decode), dict, params, wait_s=wait_s)


def pieces(ids: Sequence[int]) -> Call[list[bytes]]:
    """What tokens are as bytes."""
    content = _body(PiecesRequest, ids=list(ids))
    parse = _json(PiecesReply.model_validate_json, "pieces")
    return Call("POST", "/pieces", parse, _merge_pieces, content=content)


def update(
    key: RecordKey,
    reward: float | None,
    info: Mapping[str, Any] | None,
    sample_ids: Iterable[SampleId] | None,
    token_level_reward: Iterable[float] | None,
) -> Call[UpdateReply]:
    """Write what a workflow knows after the run."""
    content = _body(
        UpdateRequest,
        key=key,
        # Numpy's and torch's numbers become Python's.
        reward=None if reward is None else float(reward),
        info=info,
        sample_ids=None if sample_ids is None else list(sample_ids),
        token_level_reward=(
            None if token_level_reward is None else [float(each) for each in token_level_reward]
        ),
    )
    parse = _json(UpdateReply.model_validate_json)
    return Call("PATCH", "", parse, _merge_updates, content=content)


def overwrite(key: RecordKey, records: Iterable[Record]) -> Call[int]:
    """Replace all that a key has."""
    params, content = {"key": key.text}, encode_runs(merged_by_key(records))
    return Call("PUT", "", _count, _total, params, content, media_type=MEDIA_TYPE)


def delete(where: Selection) -> Call[int]:
    """Delete the runs that are selected."""
    return Call("DELETE", "", _count, _total, _where(where))


def drain(
    where: Selection, lease: str, wait_s: float, lease_s: float, max_bytes: int | None
) -> Call[Mapping[str, Stream]]:
    """Hand the runs that are selected out, a page of them, by the server's URL."""
    content = _body(
        DrainRequest,
        **_where(where),
        lease=lease,
        wait_s=wait_s,
        lease_s=lease_s,
        max_bytes=max_bytes,
    )
    return Call(
        "POST",
        "/drain",
        _given,
        dict,
        content=content,
        wait_s=wait_s,
        if_partial="what the others handed out was given back",
        streamed=True,
    )


def ack(lease: ServerLease) -> Call[int]:
    """Drained runs are safe with the caller."""
    return Call("POST", "/ack", _count, _total, content=_body(LeaseRequest, lease=lease.id))


def release(lease: ServerLease) -> Call[int]:
    """Drained runs are given back."""
    return Call("POST", "/release", _count, _total, content=_body(LeaseRequest, lease=lease.id))


def extend(lease: ServerLease, lease_s: float) -> Call[None]:
    """A lease's time begins anew."""
    content = _body(ExtendRequest, lease=lease.id, lease_s=lease_s)
    return Call("POST", "/extend", _none, _none, content=content)


def block(where: Selection) -> Call[None]:
    """Refuse records there."""
    return Call("POST", "/block", _none, _none, content=_body(BlockRequest, **_where(where)))


def forget(prefixes: Iterable[KeyPrefix]) -> Call[int]:
    """Delete what is there, and refuse what comes late."""
    content = _body(ForgetRequest, prefixes=[str(each) for each in prefixes])
    return Call("POST", "/forget", _count, _total, content=content)


def sweep(older_than_s: float) -> Call[int]:
    """Delete old runs."""
    content = _body(SweepRequest, older_than_s=older_than_s)
    return Call("POST", "/sweep", _count, _total, content=content)


def set_version(version: str | int) -> Call[None]:
    """Tell the engine the label of its weights."""
    return Call("POST", "/version", _none, _none, content=_body(VersionRequest, version=version))


def flush() -> Call[bool]:
    """Wait until what has finished is stored."""
    parse = _json(FlushReply.model_validate_json, "flushed")
    return Call("POST", "/flush", parse, lambda parts: all(parts.values()))


def stats() -> Call[dict[str, StatsReply]]:
    """Counters of recorder and store."""
    return Call("GET", "/stats", _json(StatsReply.model_validate_json), dict)


def _where(where: Selection) -> dict[str, str]:
    return {"key": where.text} if isinstance(where, RecordKey) else {"prefix": str(where)}


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
        except (ValidationError, msgspec.MsgspecError) as error:
            raise strange(response, error) from error
        return getattr(reply, name) if name else reply

    return parse


_count = _json(CountReply.model_validate_json, "records")


def strange(response: httpx.Response, why: object) -> ServerFaultError:
    """What answers is not `/records`."""
    kind = response.headers.get("content-type", "untyped")
    return ServerFaultError(
        f"answered {response.status_code} with {response.num_bytes_downloaded} {kind} bytes, which "
        "is not what /records answers; is something else at this address, or a proxy between? "
        f"({why})"
    )


def _none(_: object) -> None:
    return None


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _given(stream: Stream) -> Stream:
    return stream


def _merge_runs(parts: Mapping[str, Stream]) -> list[Run]:
    return merged_by_key(run for part in parts.values() for run in part.runs)


def _merge_pieces(parts: Mapping[str, list[str]]) -> list[bytes]:
    return [base64.b64decode(each) for each in next(iter(parts.values()))]


def _merge_updates(parts: Mapping[str, UpdateReply]) -> UpdateReply:
    # A run may be spread over servers: a name is unknown where none of them knows it.
    replies = list(parts.values())
    unknown = [
        each for each in replies[0].unknown if all(each in other.unknown for other in replies)
    ]
    return UpdateReply(updated=sum(each.updated for each in replies), unknown=unknown)


def merged_keys(parts: Iterable[Iterable[KeyReply]]) -> list[KeyReply]:
    """What each of several servers has of the runs, summed; keys in order."""
    merged: dict[RecordKey, KeyReply] = {}
    for reply in (each for part in parts for each in part):
        other = merged.get(reply.key)
        if other is not None:
            added = ("records", "rewarded", "pending", "bytes")
            update = {name: getattr(reply, name) + getattr(other, name) for name in added}
            update["missing"] = dict(Counter(reply.missing) + Counter(other.missing))
            update["reward"] = other.reward if reply.reward is None else reply.reward
            # Where nothing is stored yet, there is no age.
            ages = [each.age_s for each in (reply, other) if each.records]
            reply = reply.model_copy(update={**update, "age_s": min(ages, default=0.0)})
        merged[reply.key] = reply
    return [merged[key] for key in sorted(merged)]
