"""The two clients: they carry calls out, and differ in how they wait."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

import httpx
from typing_extensions import Self

from recorder_core.client import calls, plans
from recorder_core.client.calls import Call, Result, Stream
from recorder_core.client.plans import Plan
from recorder_core.client.servers import Outcome, Servers, is_transient
from recorder_core.codec import StreamDecoder
from recorder_core.drained import Drained
from recorder_core.errors import CodecError, RecorderError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix
from recorder_core.local import (
    Key,
    Prefix,
    check_known,
    in_parts,
    new_lease,
    parsed,
    records_of,
    selected,
)
from recorder_core.protocol import DEFAULT_LEASE_S, KeyReply, StatsReply
from recorder_core.recent import News
from recorder_core.records import Record
from recorder_core.runs import Run, SampleId
from recorder_core.trajectories import Keep, assemble

_MAX_THREADS = 32


class RecordClient(Servers[httpx.Client]):
    """Reads and writes the records of one or many servers as if they were one.

    With many servers each call goes to all of them at once, a thread each. Where some fail, the
    first error is raised, by its type, after all have answered; its message names every server
    that failed. A call is sent again when the connection breaks or a proxy answers 502, 503 or 504:
    none does more harm twice than once. Where a reply was lost, a count may leave out what the
    first attempt did.

    Every method may raise `ServerUnreachableError`, `NotAuthorizedError`, `BadRequestError` or
    `ServerFaultError` (each a `ClientError`), and `InvalidKeyError` for what is no key or prefix.
    Thread-safe.

    Args:
        base_url: `http://host:8000`, with or without `/v1`; or several, each store once. Of
            replicas that come and go `file:///path`, a file with a URL in each line, or
            `dns+http://name:8000`, all addresses of a name: both are looked up for every call.
        admin_key: The server's `--recording-admin-key`; by default from `RECORDER_ADMIN_KEY`.
        timeout: Seconds that a server may be silent, beyond the time that a drain waits.
        retries: How often a call is sent again.
        progress: Told while runs arrive: how many records of a reply so far, and bytes.
        http_client: An httpx client with settings of your own (TLS, proxies); not closed by us.

    Raises:
        ValueError: A URL or the key cannot be used.

    Example:
        >>> with RecordClient("http://localhost:8000") as client:  # doctest: +SKIP
        ...     client.update_reward("0/task-7/1", 1.0)
        ...     with client.drain("0", wait_s=30) as drained:
        ...         train(drained.experiences)
    """

    _new_http = httpx.Client

    def keys(self, prefix: Prefix = "", *, key: Key | None = None) -> list[KeyReply]:
        """What is recorded and in flight, run by run, summed over the servers.

        Args:
            prefix: Leading components of the keys; the empty text means all. A `RecordKey` means
                that run alone.
            key: One run, and no longer key that begins so; in place of a prefix.
        """
        return self._follow(plans.keys(self.urls, selected(prefix, key)))

    def runs(
        self, prefix: Prefix = "", *, key: Key | None = None, drained: bool = False
    ) -> list[Run]:
        """The runs, keys in order; they stay where they are.

        Args:
            prefix: As of `keys`.
            key: As of `keys`.
            drained: With what was drained lately and the servers remember; see
                `--recording-recent-bytes`.
        """
        return self._everywhere(calls.runs(selected(prefix, key), drained=drained))

    def get(self, prefix: Prefix = "", *, key: Key | None = None) -> list[Record]:
        """The records of `runs`, by key, parents first."""
        return records_of(self.runs(prefix, key=key))

    def experiences(
        self, prefix: Prefix = "", *, key: Key | None = None, keep: Keep | None = None
    ) -> list[Experience]:
        """As `runs`, assembled here."""
        return assemble(self.runs(prefix, key=key), keep=keep)

    def update_reward(
        self,
        key: Key,
        reward: float | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        sample_ids: Collection[SampleId] | None = None,
        token_level_reward: Iterable[float] | None = None,
    ) -> int:
        """Write what a workflow knows after the run.

        Args:
            key: The run.
            reward: The new reward; None leaves it.
            info: Merged into the info of the run, or of the generations.
            sample_ids: Only these generations: record ids, or the `id` of an API's reply, or
                `(id, index)` for one of its choices. None means the run: generations that end
                later have the reward too.
            token_level_reward: float32 [response tokens], the same for each generation selected.

        Returns:
            The number of generations that have it now; 0 if there are none, which is no error.

        Raises:
            NothingRecordedError: One of the `sample_ids` is not recorded under this run; the
                others are done.
        """
        call = calls.update(parsed(key), reward, info, sample_ids, token_level_reward)
        reply = self._everywhere(call)
        check_known(parsed(key), reply.unknown)
        return reply.updated

    @contextmanager
    def drain(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Drained]:
        """Take runs, and acknowledge them when the block ends well.

        When the block raises they are given back at once, with their rewards. Arguments and errors
        are those of `lease` and `ack`.
        """
        drained = self.lease(
            prefix, key=key, wait_s=wait_s, lease_s=lease_s, max_bytes=max_bytes, keep=keep
        )
        try:
            yield drained
        except BaseException:
            with suppress(RecorderError):  # they come back when the lease ends
                self.release(drained)
            raise
        self.ack(drained)

    def lease(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
        lease: str | None = None,
    ) -> Drained:
        """Take runs; they come back unless `ack` is called in time.

        Where some of many servers fail an error is raised, and what the others handed out is given
        back.

        Args:
            prefix: Leading components of the keys; the empty text takes everything. A `RecordKey`
                takes that run alone.
            key: One run; in place of a prefix.
            wait_s: Seconds to wait for generations in flight there.
            lease_s: Seconds until the runs come back.
            max_bytes: Take one page: whole runs until they come to so much of a server's memory,
                or to a few hundred runs, but at least one; `Drained.more` says whether there are
                others. None takes everything, page after page.
            keep: Which generations the experiences are made of; None: all. See `assemble`.
            lease: A name for it, unique: asked again with the same, the answer is the same. By
                default one is made, and a request whose reply is lost is repeated with it.
        """
        plan = plans.lease(
            self.urls,
            selected(prefix, key),
            lease or new_lease(),
            wait_s=wait_s,
            lease_s=lease_s,
            max_bytes=max_bytes,
            keep=keep,
        )
        return self._follow(plan)

    def ack(self, drained: Drained) -> int:
        """Drained records are safe: their servers may forget them. Twice is no error.

        Returns:
            The number of records forgotten by this call.

        Raises:
            LeaseError: A lease has run out: that server will hand its records out again.
        """
        return self._follow(plans.settle(drained.leases, calls.ack))

    def release(self, drained: Drained) -> int:
        """Give drained runs back at once; returns how many records are back by this call."""
        return self._follow(plans.settle(drained.leases, calls.release))

    def extend(self, drained: Drained, lease_s: float = DEFAULT_LEASE_S) -> None:
        """Begin a drain's time anew.

        Raises:
            LeaseError: A lease has run out already.
        """
        call = functools.partial(calls.extend, lease_s=lease_s)
        self._follow(plans.settle(drained.leases, call))

    def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """Replace all that a key has, on every server, by these records.

        With many servers the first takes the records, and then the key is emptied on the others.
        Records that the first refuses change nothing anywhere. Where one of the others fails it
        still has its old records: the call is to be repeated.

        Returns:
            The number of records written.
        """
        first, *others = self.urls
        call = calls.overwrite(parsed(key), records)
        written = self._follow(plans.everywhere([first], call))
        if others:
            self._follow(plans.everywhere(others, calls.overwrite(parsed(key), ())))
        return written

    def delete(self, prefix: Prefix | None = None, *, key: Key | None = None) -> int:
        """Delete runs, drained ones included; returns how many records."""
        return self._everywhere(calls.delete(selected(prefix, key)))

    def block(self, prefix: Prefix | None = None, *, key: Key | None = None) -> None:
        """Refuse records there from now on; what is there stays."""
        self._everywhere(calls.block(selected(prefix, key)))

    def forget(self, prefixes: Iterable[str | KeyPrefix]) -> int:
        """Delete all that lies under prefixes, drained runs included, and refuse what comes late.

        Args:
            prefixes: Any number; a call to a server carries 1,000.

        Returns:
            The number of records deleted.
        """
        return sum(self._everywhere(calls.forget(part)) for part in in_parts(prefixes))

    def sweep(self, older_than_s: float) -> int:
        """Delete runs that nothing was added to for so many seconds; returns records deleted."""
        return self._everywhere(calls.sweep(older_than_s))

    def set_version(self, version: str | int) -> None:
        """Name the weights that sample from now on, where the engine has a label to set."""
        self._everywhere(calls.set_version(version))

    def flush(self) -> bool:
        """Wait until every finished generation is stored; False if the server's time ran out."""
        return self._everywhere(calls.flush())

    def recent(
        self, after: Mapping[str, str] | None = None, *, wait_s: float = 0.0
    ) -> Mapping[str, News]:
        """What finished lately, in brief, and what became of runs, by the server's URL.

        Args:
            after: The `next` of each server's answer before, by its URL; without one a server
                begins with the oldest that it remembers. An answer is a page of it.
            wait_s: Seconds that a server waits where it has nothing to tell; the answers of all
                are waited for.
        """
        return self._follow(plans.recent(self.urls, after or {}, wait_s))

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of tokens, from the tokenizer of the first server: replicas have the same.

        Args:
            ids: Token ids, each of them once, at most 20,000.

        Raises:
            BadRequestError: The server does not know them.
        """
        return self._follow(plans.everywhere(self.urls[:1], calls.pieces(ids)))

    def stats(self) -> dict[str, StatsReply]:
        """Counters of recorder and store, by the server's URL."""
        return self._everywhere(calls.stats())

    def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _everywhere(self, call: Call[Result]) -> Result:
        return self._follow(plans.everywhere(self.urls, call))

    def _follow(self, plan: Plan[Result]) -> Result:
        answers: Any = None
        while True:
            try:
                asked = plan.send(answers)
            except StopIteration as end:
                return cast("Result", end.value)
            answers = self._parts(asked)

    def _parts(self, asked: Mapping[str, Call[Any]]) -> list[Any]:
        """What each server answered, or the error."""
        if len(asked) == 1:
            return [self._send(*each) for each in asked.items()]
        threads = ThreadPoolExecutor(_MAX_THREADS)
        try:
            return list(threads.map(self._send, asked.keys(), asked.values()))
        finally:
            threads.shutdown(wait=False)  # Ctrl-C waits for no server

    def _send(self, url: str, call: Call[Any]) -> Any:
        pauses = self._pauses()
        while True:
            outcome: Outcome
            try:
                with self._http.stream(**self._arguments(url, call)) as response:
                    outcome = self._received(call, response)
            except httpx.RequestError as error:
                outcome = error
            pause = next(pauses, None) if is_transient(outcome) else None
            if pause is None:
                return self._read(url, call, outcome)
            time.sleep(pause)

    def _received(self, call: Call[Any], response: httpx.Response) -> Outcome:
        if not (call.streamed and response.is_success):
            response.read()
            return response
        decoder = StreamDecoder()
        try:
            for piece in response.iter_bytes():
                decoder.feed(piece)
                self._tell(decoder)
            return Stream(decoder.head, decoder.close())
        except CodecError as error:
            return calls.strange(response, error)


class AsyncRecordClient(Servers[httpx.AsyncClient]):
    """`RecordClient` for asyncio: the same arguments, methods and errors, to be awaited.

    With many servers each call goes to all of them at once. One client serves one event loop.

    Example:
        >>> async with AsyncRecordClient(["http://a:8000", "http://b:8000"]) as client:
        ...     async with client.drain("0", wait_s=30) as drained:  # doctest: +SKIP
        ...         train(drained.experiences)
    """

    _new_http = httpx.AsyncClient

    async def keys(self, prefix: Prefix = "", *, key: Key | None = None) -> list[KeyReply]:
        """See `RecordClient.keys`."""
        return await self._follow(plans.keys(self.urls, selected(prefix, key)))

    async def runs(
        self, prefix: Prefix = "", *, key: Key | None = None, drained: bool = False
    ) -> list[Run]:
        """See `RecordClient.runs`."""
        return await self._everywhere(calls.runs(selected(prefix, key), drained=drained))

    async def get(self, prefix: Prefix = "", *, key: Key | None = None) -> list[Record]:
        """See `RecordClient.get`."""
        return records_of(await self.runs(prefix, key=key))

    async def experiences(
        self, prefix: Prefix = "", *, key: Key | None = None, keep: Keep | None = None
    ) -> list[Experience]:
        """See `RecordClient.experiences`; assembled on a thread."""
        return await asyncio.to_thread(assemble, await self.runs(prefix, key=key), keep=keep)

    async def update_reward(
        self,
        key: Key,
        reward: float | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        sample_ids: Collection[SampleId] | None = None,
        token_level_reward: Iterable[float] | None = None,
    ) -> int:
        """See `RecordClient.update_reward`."""
        call = calls.update(parsed(key), reward, info, sample_ids, token_level_reward)
        reply = await self._everywhere(call)
        check_known(parsed(key), reply.unknown)
        return reply.updated

    @asynccontextmanager
    async def drain(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
    ) -> AsyncIterator[Drained]:
        """See `RecordClient.drain`; `experiences` are assembled on the thread that asks."""
        drained = await self.lease(
            prefix, key=key, wait_s=wait_s, lease_s=lease_s, max_bytes=max_bytes, keep=keep
        )
        try:
            yield drained
        except BaseException:
            with suppress(RecorderError):  # they come back when the lease ends
                await self.release(drained)
            raise
        await self.ack(drained)

    async def lease(
        self,
        prefix: Prefix = "",
        *,
        key: Key | None = None,
        wait_s: float = 0.0,
        lease_s: float = DEFAULT_LEASE_S,
        max_bytes: int | None = None,
        keep: Keep | None = None,
        lease: str | None = None,
    ) -> Drained:
        """See `RecordClient.lease`."""
        plan = plans.lease(
            self.urls,
            selected(prefix, key),
            lease or new_lease(),
            wait_s=wait_s,
            lease_s=lease_s,
            max_bytes=max_bytes,
            keep=keep,
        )
        return await self._follow(plan)

    async def ack(self, drained: Drained) -> int:
        """See `RecordClient.ack`."""
        return await self._follow(plans.settle(drained.leases, calls.ack))

    async def release(self, drained: Drained) -> int:
        """See `RecordClient.release`."""
        return await self._follow(plans.settle(drained.leases, calls.release))

    async def extend(self, drained: Drained, lease_s: float = DEFAULT_LEASE_S) -> None:
        """See `RecordClient.extend`."""
        call = functools.partial(calls.extend, lease_s=lease_s)
        await self._follow(plans.settle(drained.leases, call))

    async def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """See `RecordClient.overwrite`."""
        first, *others = self.urls
        call = calls.overwrite(parsed(key), records)
        written = await self._follow(plans.everywhere([first], call))
        if others:
            await self._follow(plans.everywhere(others, calls.overwrite(parsed(key), ())))
        return written

    async def delete(self, prefix: Prefix | None = None, *, key: Key | None = None) -> int:
        """See `RecordClient.delete`."""
        return await self._everywhere(calls.delete(selected(prefix, key)))

    async def block(self, prefix: Prefix | None = None, *, key: Key | None = None) -> None:
        """See `RecordClient.block`."""
        await self._everywhere(calls.block(selected(prefix, key)))

    async def forget(self, prefixes: Iterable[str | KeyPrefix]) -> int:
        """See `RecordClient.forget`."""
        return sum([await self._everywhere(calls.forget(part)) for part in in_parts(prefixes)])

    async def sweep(self, older_than_s: float) -> int:
        """See `RecordClient.sweep`."""
        return await self._everywhere(calls.sweep(older_than_s))

    async def set_version(self, version: str | int) -> None:
        """See `RecordClient.set_version`."""
        await self._everywhere(calls.set_version(version))

    async def flush(self) -> bool:
        """See `RecordClient.flush`."""
        return await self._everywhere(calls.flush())

    async def recent(
        self, after: Mapping[str, str] | None = None, *, wait_s: float = 0.0
    ) -> Mapping[str, News]:
        """See `RecordClient.recent`."""
        return await self._follow(plans.recent(self.urls, after or {}, wait_s))

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """See `RecordClient.pieces`."""
        return await self._follow(plans.everywhere(self.urls[:1], calls.pieces(ids)))

    async def stats(self) -> dict[str, StatsReply]:
        """See `RecordClient.stats`."""
        return await self._everywhere(calls.stats())

    async def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _everywhere(self, call: Call[Result]) -> Result:
        return await self._follow(plans.everywhere(self.urls, call))

    async def _follow(self, plan: Plan[Result]) -> Result:
        answers: Any = None
        while True:
            try:
                asked = plan.send(answers)
            except StopIteration as end:
                return cast("Result", end.value)
            answers = await self._parts(asked)

    async def _parts(self, asked: Mapping[str, Call[Any]]) -> list[Any]:
        """What each server answered, or the error."""
        return await asyncio.gather(*(self._send(*each) for each in asked.items()))

    async def _send(self, url: str, call: Call[Any]) -> Any:
        pauses = self._pauses()
        while True:
            outcome: Outcome
            try:
                async with self._http.stream(**self._arguments(url, call)) as response:
                    outcome = await self._received(call, response)
            except httpx.RequestError as error:
                outcome = error
            pause = next(pauses, None) if is_transient(outcome) else None
            if pause is None:
                return self._read(url, call, outcome)
            await asyncio.sleep(pause)

    async def _received(self, call: Call[Any], response: httpx.Response) -> Outcome:
        if not (call.streamed and response.is_success):
            await response.aread()
            return response
        decoder = StreamDecoder()
        try:
            # A frame takes a millisecond to decode: no longer is the event loop held up.
            async for piece in response.aiter_bytes():
                decoder.feed(piece)
                self._tell(decoder)
            return Stream(decoder.head, decoder.close())
        except CodecError as error:
            return calls.strange(response, error)
