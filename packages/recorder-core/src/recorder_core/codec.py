"""Runs as bytes: a stream of frames that neither side ever holds whole, and a file format as well.

A stream is eight magic bytes, then frames: each a little-endian uint32 length and so many bytes of
MessagePack. A frame is a map; its `type` says what it holds:

- `head`, the first: what a drain tells beside its runs.
- `runs`: some runs, each with some of its records. A run of many records goes on in further frames,
  where only the records count; parents come before the records that continue them.
- `end`, the last: how many records the stream has, and in files the bytes of their token ids where
  that is asked for. A stream without it was cut off.

In a record, `data` is one buffer as `Record.pack` makes it; it is written as it lies. Arrays
besides are `[dtype, shape, bytes]`. Blobs that earlier releases wrote are read too (`blobs`).

Nothing in a stream is trusted: types are checked by msgspec as they are read, lengths against the
bytes that are there.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from recorder_core import blobs
from recorder_core.errors import CodecError, InvalidKeyError
from recorder_core.experience import Experience, ExperienceTurn
from recorder_core.keys import RecordKey
from recorder_core.records import Record
from recorder_core.runs import Run, fits

MEDIA_TYPE = "application/vnd.recorder"
MAGIC = b"\x93RECORD2"
FRAME_BYTES = 1 << 16
"""About how large a frame grows: one is encoded within a fraction of a millisecond."""
MAX_FRAME_BYTES = 1 << 31

_LENGTH_BYTES = 4


class Head(msgspec.Struct, tag="head", omit_defaults=True):
    """What a drain tells beside its runs."""

    lease: str = ""
    """What is to be acknowledged; empty where nothing was taken."""
    pending: int = 0
    """Generations under the prefix that were not finished."""
    flushed: bool = True
    """Whether everything that had finished before is stored."""
    more: bool = False
    """Whether there are runs that this page has no room for."""


class _Part(msgspec.Struct, omit_defaults=True):
    """Some of a run's records; the first part also has what is known of the run."""

    key: RecordKey
    records: list[Record] = []
    reward: float | None = None
    info: dict[str, Any] = {}
    dropped: dict[str, int] = {}
    evicted: int = 0
    pending: int = 0
    closed: bool = False


class _Runs(msgspec.Struct, tag="runs"):
    runs: list[_Part]


class _End(msgspec.Struct, tag="end", omit_defaults=True):
    records: int
    pieces: dict[int, bytes] = {}


def encode_hook(value: Any) -> Any:
    """How msgspec writes what it does not know of a record: keys and arrays."""
    if isinstance(value, RecordKey):
        return value.text
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()]
    raise TypeError(f"{type(value).__name__} has no place in a record")


def decode_hook(kind: type[Any], value: Any) -> Any:
    """How msgspec reads it back; in JSON bytes are base64."""
    if kind is RecordKey:
        return _key(value)
    dtype, shape, data = value
    data = base64.b64decode(data) if isinstance(data, str) else data
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype} is none of numbers")
    return np.frombuffer(data, dtype).reshape(shape)


@functools.lru_cache(maxsize=64)  # a record names its run's key once more
def _key(text: Any) -> RecordKey:
    if not isinstance(text, str):
        raise ValueError(f"a record key is a text, not {type(text).__name__}")
    return RecordKey.parse(text)


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)
_frames = msgspec.msgpack.Decoder(Head | _Runs | _End, dec_hook=decode_hook)
_records = msgspec.msgpack.Decoder(Record, dec_hook=decode_hook)
_experiences = msgspec.msgpack.Decoder(list[Experience], dec_hook=decode_hook)


def encode_record(record: Record) -> bytes:
    """Write one record, alone.

    Raises:
        ValueError: It cannot be written: a lone surrogate in a text, say.
    """
    try:
        return _encoder.encode(record)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"the record cannot be written: {error}") from error


def decode_record(blob: bytes) -> Record:
    """Read it back.

    Raises:
        CodecError: The bytes are truncated, corrupt, or hold something else.
    """
    try:
        return _records.decode(blob)
    except (msgspec.MsgspecError, InvalidKeyError, ValueError, TypeError) as error:
        raise CodecError(f"the bytes are no record: {error}") from None


def check_writable(record: Record) -> None:
    """Check that a record can be written: a lone surrogate in a text, say, cannot.

    Raises:
        ValueError: It cannot.
    """
    encode_record(record)


def encode_stream(
    runs: Iterable[Run],
    head: Head | None = None,
    *,
    pieces: Callable[[set[int]], dict[int, bytes]] | None = None,
) -> Iterator[bytes]:
    """Write runs as a stream, a frame at a time.

    Args:
        runs: The runs.
        head: What is told beside them.
        pieces: Gives the bytes of the token ids that are there, which go with them; None: none do.

    Yields:
        Bytes, `FRAME_BYTES` or a little more at a time, unless a single record is larger.
    """
    yield MAGIC + _frame(head or Head())
    count = size = 0
    ids: set[int] = set()
    parts: list[_Part] = []
    for run in runs:
        part = _Part(
            run.key,
            [],
            run.reward,
            dict(run.info) if run.info else {},
            dict(run.dropped) if run.dropped else {},
            run.evicted,
            run.pending,
            run.closed,
        )
        parts.append(part)
        size += run.own_bytes
        for record in run.records.values():
            part.records.append(record)
            if pieces is not None:
                ids.update(np.unique(record.new_ids).tolist())
            size += record.nbytes
            count += 1
            if size >= FRAME_BYTES:
                yield _frame(_Runs(parts))
                part = _Part(run.key, [])
                parts, size = [part], 0
    yield _frame(_Runs(parts)) + _frame(_End(count, {} if pieces is None else pieces(ids)))


def _frame(content: Any) -> bytes:
    body = _encoder.encode(content)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class StreamDecoder:
    """Reads a stream piece by piece, as it arrives.

    Example:
        >>> decoder = StreamDecoder()
        >>> for piece in pieces:  # doctest: +SKIP
        ...     decoder.feed(piece)
        >>> runs = decoder.close()  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.head = Head()
        """What the stream began with."""
        self.records = 0
        """Records read so far."""
        self.bytes = 0
        """Bytes read so far."""
        self.pieces: dict[int, bytes] = {}
        """The bytes of token ids, where the stream ended with them."""
        self._runs: dict[RecordKey, Run] = {}
        self._rest = bytearray()
        self._begun = self._ended = False
        self._blob: bytearray | None = None

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, of any number.

        Raises:
            CodecError: They are not what a stream goes on with.
        """
        self.bytes += len(piece)
        if self._blob is not None:
            self._blob += piece
            return
        rest = self._rest
        if rest:
            rest += piece
            with memoryview(rest) as view:
                taken = self._take_frames(view)
            del rest[:taken]
        else:  # a stream that is there as a whole is not copied
            view = memoryview(piece)
            rest += view[self._take_frames(view) :]
        if not self._begun and len(rest) >= len(MAGIC):
            self._blob = rest  # an earlier release's, which can only be read whole

    def _take_frames(self, buffer: memoryview) -> int:
        """Take the frames that are there as a whole; returns where the next one begins."""
        position = 0
        if not self._begun:
            if buffer[: len(MAGIC)] != MAGIC:
                return 0
            position, self._begun = len(MAGIC), True
        while (begin := position + _LENGTH_BYTES) <= len(buffer):
            length = int.from_bytes(buffer[position:begin], "little")
            if length > MAX_FRAME_BYTES:
                raise CodecError(f"a frame claims {length} bytes, at most {MAX_FRAME_BYTES} are")
            if begin + length > len(buffer):
                break
            position = begin + length
            with buffer[begin:position] as body:
                self._take(body)
        return position

    def _take(self, body: memoryview) -> None:
        if self._ended:
            raise CodecError("the stream goes on after its end")
        try:
            frame = _frames.decode(body)
        except (msgspec.MsgspecError, InvalidKeyError, ValueError, TypeError) as error:
            raise CodecError(f"the stream holds a frame that is none: {error}") from None
        if isinstance(frame, Head):
            self.head = frame
        elif isinstance(frame, _End):
            if frame.records != self.records:
                raise CodecError(f"{self.records} of {frame.records} records were in the stream")
            self._ended = True
            self.pieces = frame.pieces
        else:
            for part in frame.runs:
                self._add(part)

    def _add(self, part: _Part) -> None:
        run = self._runs.get(part.key)
        if run is None:
            run = self._runs[part.key] = Run(
                part.key,
                reward=part.reward,
                info=part.info,
                dropped=part.dropped,
                evicted=part.evicted,
                pending=part.pending,
                closed=part.closed,
            )
        key = run.key
        for record in part.records:
            known = run.records
            if record.key is not key and record.key != key:
                raise CodecError(f"run {key} holds record {record.id} of {record.key}")
            if record.id in known:
                raise CodecError(f"record {record.id} of {key} is given twice")
            if record.before is not None and not fits(record, known):
                raise CodecError(
                    f"record {record.id} of {key} comes before {record.before}, or does not "
                    "begin where that one ends"
                )
            record.key = key  # one object for all of them
            run.put(record)
        self.records += len(part.records)

    def close(self) -> list[Run]:
        """The runs, in the order of the stream.

        Raises:
            CodecError: The stream was cut off, or is none.
        """
        if self._blob is not None:
            return blobs.decode(bytes(self._blob))
        if not self._ended:
            raise CodecError(f"the stream was cut off after {self.bytes} bytes")
        if self._rest:
            raise CodecError(f"{len(self._rest)} bytes follow the stream's end")
        return list(self._runs.values())


def encode_runs(runs: Iterable[Run], head: Head | None = None) -> bytes:
    """Write runs as one stream, whole."""
    return b"".join(encode_stream(runs, head))


def decode_runs(stream: bytes | bytearray | memoryview) -> list[Run]:
    """Read runs back.

    Raises:
        CodecError: The stream is truncated, corrupt, or holds something else.
    """
    decoder = StreamDecoder()
    decoder.feed(stream)
    return decoder.close()


def encode_experiences(experiences: Iterable[Experience]) -> bytes:
    """Write experiences as MessagePack; for what a pipeline has added to them."""
    return _encoder.encode(list(experiences))


def decode_experiences(blob: bytes | bytearray | memoryview) -> list[Experience]:
    """Read experiences back.

    Raises:
        CodecError: The bytes are truncated, corrupt, or hold something else.
    """
    try:
        return _experiences.decode(blob)
    except (msgspec.MsgspecError, InvalidKeyError, ValueError, TypeError) as error:
        raise CodecError(f"the bytes are no experiences: {error}") from None


def as_json(experiences: Iterable[Experience]) -> bytes:
    """Experiences for people: arrays as lists, NaN as null, of each turn all but its ids."""
    described = []
    for experience in experiences:
        fields = msgspec.structs.asdict(experience)
        fields["turns"] = [_turn_for_people(turn) for turn in experience.turns]
        described.append({name: value for name, value in fields.items() if value is not None})
    return msgspec.json.encode(described, enc_hook=_for_people)


def _turn_for_people(turn: ExperienceTurn) -> dict[str, Any]:
    fields = msgspec.structs.asdict(turn.record)
    del fields["data"], fields["routed_experts"], fields["sampling_mask"]
    for name in ("response_text", "request_id"):
        fields[name] = getattr(turn.record, name)
    fields |= {"start": turn.start, "end": turn.end}
    return {name: value for name, value in fields.items() if value is not None}


def _for_people(value: Any) -> Any:
    if isinstance(value, RecordKey):
        return value.text
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in an experience")
