"""What a server of its own shows: engines that record, and files of drained runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
from pydantic import TypeAdapter, ValidationError

from recorder_core.codec import StreamDecoder, decode_runs
from recorder_core.errors import CodecError, RecorderError
from recorder_core.keys import RecordKey
from recorder_core.protocol import MAX_KEYS, PREFIX, KeyReply
from recorder_core.recent import MAX_GENERATIONS, News, Recent
from recorder_core.runs import Run, merged_by_key
from recorder_core.view.pieces import NoPiecesError, Pieces

_WAIT_S = 10.0
_TIMEOUT_S = 60.0
_PAUSE_S = 2.0
_MAX_RECENT = 2_000
_KEYS = TypeAdapter(list[KeyReply])
# What an engine may answer, or not answer, that costs the page that engine and no more.
_FAULTS = (httpx.HTTPError, msgspec.MsgspecError, RecorderError, ValidationError, ValueError)


class Source(Protocol):
    """One engine, or one file."""

    name: str
    fault: str | None
    """Why it does not answer; None: it does."""

    async def runs(self, key: RecordKey) -> list[Run]:
        """What it has of a run, with what was drained."""
        ...

    async def keys(self) -> list[KeyReply]:
        """What it has, run by run."""
        ...

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """The bytes of token ids; raises RecorderError where they are not known."""
        ...

    async def stats(self) -> Mapping[str, Any]:
        """The counters `recorder` and `store` of `GET /records/stats`."""
        ...


class File:
    """A file of runs, as a drain writes it.

    Raises:
        CodecError: It holds something else.
        OSError: It cannot be read.
    """

    fault: str | None = None

    def __init__(self, path: str, recent: Recent) -> None:
        self.name = path
        try:
            decoder = StreamDecoder()
            decoder.feed(Path(path).read_bytes())
            found = merged_by_key(decoder.close())
        except (CodecError, RecorderError) as error:
            raise CodecError(f"{path} holds no runs: {error}") from None
        self._runs = {run.key: run for run in found}
        self._pieces = decoder.pieces
        self._bytes = sum(run.nbytes for run in found)
        records = [record for run in found for record in run.records.values()]
        for record in sorted(records, key=lambda each: each.finished_at):
            recent.add(record)
        for run in found:
            rewards = [each.reward for each in run.records.values() if each.reward is not None]
            for reward in [*rewards, run.reward]:
                if reward is not None:
                    recent.rewarded(run.key, reward)

    async def runs(self, key: RecordKey) -> list[Run]:
        """See `Source`."""
        return [self._runs[key]] if key in self._runs else []

    async def keys(self) -> list[KeyReply]:
        """See `Source`."""
        return [
            KeyReply(
                key=run.key,
                records=len(run.records),
                rewarded=run.rewarded,
                reward=run.reward,
                missing=run.missing,
                closed=run.closed,
            )
            for run in self._runs.values()
        ]

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """See `Source`."""
        if not all(each in self._pieces for each in ids):
            raise NoPiecesError(f"{self.name} holds no bytes of tokens: give a --tokenizer")
        return [self._pieces[each] for each in ids]

    async def stats(self) -> Mapping[str, Any]:
        """See `Source`."""
        records = sum(len(run.records) for run in self._runs.values())
        store = {"records": records, "bytes": self._bytes, "counters": {}}
        return {"recorder": {"pending": 0, "dropped": {}}, "store": store}


class Replica:
    """An engine that records, asked over HTTP.

    Args:
        url: Its base URL.
        recent: Is told what it tells.
        admin_key: What it asks for.
        drained: Gathers the runs that were handed out.
    """

    def __init__(self, url: str, recent: Recent, admin_key: str | None, drained: set[str]) -> None:
        self.name = url
        self.fault: str | None = "not asked yet"
        self._recent = recent
        self._drained = drained
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._base = f"{url.rstrip('/')}{PREFIX}"
        self._http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S)

    async def follow(self) -> None:
        """Tell on what it tells, for ever."""
        cursor, waits = "", False
        while True:
            asked: dict[str, Any] = {"after": cursor, "limit": _MAX_RECENT}
            try:
                reply = await self._ask(
                    "GET", "/recent", params=asked | {"wait_s": waits * _WAIT_S}
                )
                news = msgspec.json.decode(reply.content, type=News)
            except _FAULTS as error:
                self.fault = str(error) or type(error).__name__
                waits = False
                await asyncio.sleep(_PAUSE_S)
                continue
            self.fault, cursor = None, news.next
            waits = len(news.generations) + len(news.runs) < _MAX_RECENT
            for change in news.runs:
                if change.drained is not None:
                    (self._drained.add if change.drained else self._drained.discard)(change.key)
            self._recent.forward(news)

    async def runs(self, key: RecordKey) -> list[Run]:
        """See `Source`."""
        reply = await self._ask("GET", "", params={"key": key.text, "recent": True})
        return decode_runs(reply.content)

    async def keys(self) -> list[KeyReply]:
        """See `Source`."""
        found: list[KeyReply] = []
        asked: dict[str, Any] = {"prefix": "", "limit": MAX_KEYS}
        while True:
            page = _KEYS.validate_json((await self._ask("GET", "/keys", params=asked)).content)
            found += page
            if len(page) < MAX_KEYS:
                return found
            asked["after"] = page[-1].key.text

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """See `Source`."""
        reply = await self._ask("POST", "/pieces", json={"ids": ids})
        return msgspec.json.decode(reply.content, type=_Pieces).pieces

    async def stats(self) -> Mapping[str, Any]:
        """See `Source`."""
        found: Mapping[str, Any] = (await self._ask("GET", "/stats")).json()
        return found

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply = await self._http.request(method, f"{self._base}{path}", **options)
        except httpx.HTTPError as error:
            raise RecorderError(f"{self.name} does not answer: {error!r}") from error
        if reply.status_code == 401:
            raise RecorderError(f"{self.name} wants another admin key: set RECORDER_ADMIN_KEY")
        if not reply.is_success:
            raise RecorderError(f"{self.name} refuses: {reply.status_code} {reply.text[:300]}")
        return reply


class _Pieces(msgspec.Struct):
    pieces: list[bytes]
    """msgspec reads bytes from base64."""


class Sources:
    """Engines and files as one, for the routes that the page reads.

    Args:
        names: URLs and paths.
        admin_key: What the engines ask for.
        pieces: The bytes of token ids, before the engines are asked; None: not known here.

    Raises:
        RecorderError: There is no such file, or it holds no runs.
        OSError: A file cannot be read.
    """

    def __init__(
        self, names: Sequence[str], *, admin_key: str | None = None, pieces: Pieces | None = None
    ) -> None:
        self._pieces = pieces
        self._drained: set[str] = set()
        self._listed: list[KeyReply] = []
        files = [name for name in names if not is_url(name)]
        for name in files:
            if not Path(name).is_file():
                raise RecorderError(f"{name} is neither a file nor a URL such as http://gpu-0:8000")
        size = sum(Path(name).stat().st_size for name in files)
        # A record takes more than a hundred bytes: of files all are shown.
        self.recent = Recent(max_generations=max(MAX_GENERATIONS, size // 100))
        self.replicas = [
            Replica(name, self.recent, admin_key, self._drained) for name in names if is_url(name)
        ]
        self.sources: list[Source] = [*self.replicas, *(File(name, self.recent) for name in files)]

    async def run(self, key: RecordKey) -> Run | None:
        """See `Looked`."""
        found = await self._of_each(lambda source: source.runs(key))
        merged = merged_by_key([run for runs in found for run in runs])
        return merged[0] if merged else None

    def drained(self, key: RecordKey) -> bool:
        """See `Looked`."""
        return key.text in self._drained

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """See `Looked`."""
        if self._pieces is not None:
            return self._pieces(ids)
        reasons: list[str] = []
        for source in self.sources:
            try:
                return await source.pieces(ids)
            except RecorderError as error:  # noqa: PERF203 - the next one may know them
                reasons.append(str(error))
        raise NoPiecesError("; ".join(reasons))

    async def keys(self, after: RecordKey | None, limit: int) -> list[KeyReply]:
        """What all have, run by run, a page at a time; asked anew for a first page."""
        if after is None:
            found: dict[RecordKey, KeyReply] = {}
            for keys in await self._of_each(lambda source: source.keys()):
                for each in keys:
                    known = found.get(each.key)
                    found[each.key] = each if known is None else _together(known, each)
            self._listed = [found[key] for key in sorted(found, key=lambda key: key.order)]
        later = (each for each in self._listed if after is None or each.key.order > after.order)
        return [each for each, _ in zip(later, range(limit), strict=False)]

    async def stats(self) -> dict[str, Any]:
        """The counters of all, added up."""
        recorder: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        store: Counter[str] = Counter()
        counters: Counter[str] = Counter()
        for each in await self._of_each(lambda source: source.stats()):
            recorder["pending"] += each["recorder"]["pending"]
            dropped.update(each["recorder"]["dropped"])
            for name in ("records", "bytes", "max_bytes"):
                store[name] += each["store"].get(name, 0)
            counters.update(each["store"]["counters"])
        return {
            "recorder": {**recorder, "dropped": dropped},
            "store": {**store, "counters": counters},
            "sources": [source.name for source in self.sources],
            "unreachable": [source.fault for source in self.sources if source.fault is not None],
        }

    async def _of_each(self, ask: Callable[[Source], Any]) -> list[Any]:
        """What each that answers says."""

        async def answer(source: Source) -> list[Any]:
            try:
                return [await ask(source)]
            except _FAULTS:
                return []  # `follow` meets the same fault, and keeps it to be told

        answers = await asyncio.gather(*map(answer, self.sources))
        return [each for found in answers for each in found]


def is_url(name: str) -> bool:
    """Whether a source is an engine and not a file."""
    return name.startswith(("http://", "https://"))


def _together(one: KeyReply, other: KeyReply) -> KeyReply:
    """What two engines have of one run."""
    return KeyReply(
        key=one.key,
        records=one.records + other.records,
        rewarded=one.rewarded + other.rewarded,
        reward=one.reward if other.reward is None else other.reward,
        pending=one.pending + other.pending,
        missing=dict(Counter(one.missing) + Counter(other.missing)),
        bytes=one.bytes + other.bytes,
        age_s=min(one.age_s, other.age_s),
        closed=one.closed or other.closed,
    )
