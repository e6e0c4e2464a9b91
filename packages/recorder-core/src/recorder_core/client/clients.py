"""The two clients: they carry calls out, and differ in how they wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from typing_extensions import Self

from recorder_core.client import calls
from recorder_core.client.calls import Call, Drained, Key, Prefix, Result
from recorder_core.client.servers import Outcome, Servers, conclude, is_transient
from recorder_core.experience import Experience
from recorder_core.protocol import DEFAULT_LEASE_S, KeyReply, StatsReply
from recorder_core.records import Record
from recorder_core.trajectories import assemble

_MAX_THREADS = 32
# Decoding more takes milliseconds, which must not hold up the agents on the same event loop.
_LARGE_BYTES = 1 << 20


class RecordClient(Servers[httpx.Client]):
    """Reads and writes the records of one or many servers as if they were one.

    With many servers each call goes to all of them at once, a thread each. Where some fail, the
    first error is raised, by its type, after all have answered; its message names every server
    that failed. Calls that do no harm twice are sent again when the connection breaks or a proxy
    answers 502, 503 or 504; a drain never is. Where a reply was lost, a count may leave out what
    the first attempt did.

    Every method may raise `ServerUnreachableError`, `NotAuthorizedError`, `BadRequestError` or
    `ServerFaultError` (each a `ClientError`), and `InvalidKeyError` for what is no key or prefix.
    Thread-safe.

    Args:
        base_url: `http://host:8000`, with or without `/v1`; or several, each store once.
        admin_key: The server's `--recording-admin-key`; by default from `RECORDER_ADMIN_KEY`.
        timeout: Seconds that a server may be silent, beyond the time that a drain waits.
        retries: How often a call that is safe to repeat is sent again.
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

    def keys(self, prefix: Prefix = "") -> list[KeyReply]:
        """What is recorded and in flight under a prefix, by key, summed over the servers."""
        return self._everywhere(calls.keys(prefix))

    def get(self, prefix: Prefix) -> list[Record]:
        """The records under a prefix, by key, parents first; they stay where they are."""
        return self._everywhere(calls.get(prefix))

    def experiences(self, prefix: Prefix) -> list[Experience]:
        """As `get`, assembled here."""
        return assemble(self.get(prefix))

    def update_reward(
        self,
        key: Key,
        reward: float | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        record_ids: Iterable[str] | None = None,
        token_level_reward: Iterable[float] | None = None,
    ) -> int:
        """Write what a workflow knows after the run.

        Args:
            key: The run.
            reward: The new reward; None leaves it.
            info: Merged into the records' info.
            record_ids: Only these records; None means all that the key has now.
            token_level_reward: float32 [response tokens], the same for each record selected.

        Returns:
            The number of records updated; 0 if there are none, which is no error.
        """
        return self._everywhere(calls.update(key, reward, info, record_ids, token_level_reward))

    @contextmanager
    def drain(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> Iterator[Drained]:
        """Take the records under a prefix, and acknowledge them when the block ends well.

        When the block raises they are not acknowledged: they come back, with their rewards, when
        the lease ends. Arguments and errors are those of `lease` and `ack`.
        """
        drained = self.lease(prefix, wait_s=wait_s, lease_s=lease_s)
        yield drained
        self.ack(drained)

    def lease(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> Drained:
        """Take the records under a prefix; they come back unless `ack` is called in time.

        So they do when the reply is lost. Where some of many servers fail an error is raised, and
        what the others handed out comes back too: nothing is lost, but the next drain sees it
        only when the leases have ended.

        Args:
            prefix: Leading components of the keys; the empty text takes everything.
            wait_s: Seconds to wait for generations in flight under the prefix.
            lease_s: Seconds until the records come back.
        """
        return self._everywhere(calls.drain(prefix, wait_s, lease_s))

    def ack(self, drained: Drained) -> int:
        """Drained records are safe: their servers may forget them. Twice is no error.

        Returns:
            The number of records forgotten by this call.

        Raises:
            LeaseError: A lease has run out: that server will hand its records out again.
        """
        return self._run({lease.url: calls.ack(lease) for lease in drained.leases})

    def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """Replace all that a key has, on every server, by these records.

        With many servers the first takes the records, and then the key is emptied on the others.
        Records that the first refuses change nothing anywhere. Where one of the others fails it
        still has its old records: the call is to be repeated.

        Returns:
            The number of records written.
        """
        first, *others = self.urls
        written = self._run({first: calls.overwrite(key, records)})
        if others:
            # Not by a delete: its prefix could match longer keys.
            self._run(dict.fromkeys(others, calls.overwrite(key, ())))
        return written

    def delete(self, prefix: Prefix) -> int:
        """Delete the records under a prefix, drained ones included; returns how many."""
        return self._everywhere(calls.delete(prefix))

    def block(self, prefix: Prefix) -> None:
        """Refuse records under a prefix from now on; what is there stays."""
        self._everywhere(calls.block(prefix))

    def sweep(self, older_than_s: float) -> int:
        """Delete keys that nothing was added to for so many seconds; returns records deleted."""
        return self._everywhere(calls.sweep(older_than_s))

    def set_version(self, version: str) -> None:
        """Name the weights that sample from now on, where the engine has a label to set."""
        self._everywhere(calls.set_version(version))

    def flush(self) -> bool:
        """Wait until every finished generation is stored; False if the server's time ran out."""
        return self._everywhere(calls.flush())

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
        return self._run(dict.fromkeys(self.urls, call))

    def _run(self, asked: Mapping[str, Call[Result]]) -> Result:
        if len(asked) == 1:
            return conclude(asked, [self._send(*each) for each in asked.items()])
        with ThreadPoolExecutor(_MAX_THREADS) as threads:
            return conclude(asked, threads.map(self._send, asked.keys(), asked.values()))

    def _send(self, url: str, call: Call[Any]) -> Any:
        pauses = self._pauses(call)
        while True:
            outcome: Outcome
            try:
                outcome = self._http.request(**self._arguments(url, call))
            except httpx.RequestError as error:
                outcome = error
            pause = next(pauses, None) if is_transient(outcome) else None
            if pause is None:
                return self._read(url, call, outcome)
            time.sleep(pause)


class AsyncRecordClient(Servers[httpx.AsyncClient]):
    """`RecordClient` for asyncio: the same arguments, methods and errors, to be awaited.

    With many servers each call goes to all of them at once. One client serves one event loop.

    Example:
        >>> async with AsyncRecordClient(["http://a:8000", "http://b:8000"]) as client:
        ...     async with client.drain("0", wait_s=30) as drained:  # doctest: +SKIP
        ...         train(drained.experiences)
    """

    _new_http = httpx.AsyncClient

    async def keys(self, prefix: Prefix = "") -> list[KeyReply]:
        """See `RecordClient.keys`."""
        return await self._everywhere(calls.keys(prefix))

    async def get(self, prefix: Prefix) -> list[Record]:
        """See `RecordClient.get`."""
        return await self._everywhere(calls.get(prefix))

    async def experiences(self, prefix: Prefix) -> list[Experience]:
        """See `RecordClient.experiences`; assembled on a thread."""
        return await asyncio.to_thread(assemble, await self.get(prefix))

    async def update_reward(
        self,
        key: Key,
        reward: float | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        record_ids: Iterable[str] | None = None,
        token_level_reward: Iterable[float] | None = None,
    ) -> int:
        """See `RecordClient.update_reward`."""
        call = calls.update(key, reward, info, record_ids, token_level_reward)
        return await self._everywhere(call)

    @asynccontextmanager
    async def drain(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> AsyncIterator[Drained]:
        """See `RecordClient.drain`; `experiences` are assembled on the thread that asks."""
        drained = await self.lease(prefix, wait_s=wait_s, lease_s=lease_s)
        yield drained
        await self.ack(drained)

    async def lease(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> Drained:
        """See `RecordClient.lease`."""
        return await self._everywhere(calls.drain(prefix, wait_s, lease_s))

    async def ack(self, drained: Drained) -> int:
        """See `RecordClient.ack`."""
        return await self._run({lease.url: calls.ack(lease) for lease in drained.leases})

    async def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """See `RecordClient.overwrite`."""
        first, *others = self.urls
        written = await self._run({first: calls.overwrite(key, records)})
        if others:
            await self._run(dict.fromkeys(others, calls.overwrite(key, ())))
        return written

    async def delete(self, prefix: Prefix) -> int:
        """See `RecordClient.delete`."""
        return await self._everywhere(calls.delete(prefix))

    async def block(self, prefix: Prefix) -> None:
        """See `RecordClient.block`."""
        await self._everywhere(calls.block(prefix))

    async def sweep(self, older_than_s: float) -> int:
        """See `RecordClient.sweep`."""
        return await self._everywhere(calls.sweep(older_than_s))

    async def set_version(self, version: str) -> None:
        """See `RecordClient.set_version`."""
        await self._everywhere(calls.set_version(version))

    async def flush(self) -> bool:
        """See `RecordClient.flush`."""
        return await self._everywhere(calls.flush())

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
        return await self._run(dict.fromkeys(self.urls, call))

    async def _run(self, asked: Mapping[str, Call[Result]]) -> Result:
        return conclude(asked, await asyncio.gather(*(self._send(*each) for each in asked.items())))

    async def _send(self, url: str, call: Call[Any]) -> Any:
        pauses = self._pauses(call)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(**self._arguments(url, call))
            except httpx.RequestError as error:
                outcome = error
            pause = next(pauses, None) if is_transient(outcome) else None
            if pause is not None:
                await asyncio.sleep(pause)
            elif isinstance(outcome, httpx.Response) and len(outcome.content) > _LARGE_BYTES:
                return await asyncio.to_thread(self._read, url, call, outcome)
            else:
                return self._read(url, call, outcome)
