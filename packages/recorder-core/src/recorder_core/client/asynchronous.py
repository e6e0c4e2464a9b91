"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Any

import httpx
from typing_extensions import Self

from recorder_core.client import calls
from recorder_core.client.calls import Call, DrainedPart, Key, Part, Prefix, Whole
from recorder_core.client.drains import DrainedRecords
from recorder_core.client.servers import LIMITS, Outcome, Servers, conclude, is_transient
from recorder_core.errors import RecorderError
from recorder_core.experience import Experience
from recorder_core.protocol import DEFAULT_LEASE_S, KeyReply, StatsReply
from recorder_core.records import Record
from recorder_core.trajectories import assemble

# Decoding this much takes milliseconds: it must not hold up the agents on the same loop.
_LARGE = 1 << 20


class AsyncRecordClient(Servers):
    """`RecordClient` for asyncio: the same methods and errors, to be awaited.

    With many servers each call goes to all of them at once. Use one per event loop.

    Args:
        base_url: `http://host:8000`, with or without `/v1`; or several, each store once.
        admin_key: The server's `--recording-admin-key`; by default from `RECORDER_ADMIN_KEY`.
        timeout: Seconds that a server may be silent, beyond the time that a drain waits.
        retries: How often a call that is safe to repeat is sent again.
        http_client: An httpx client with settings of your own (TLS, proxies); not closed by us.

    Raises:
        ValueError: A URL or the key cannot be used.

    Example:
        >>> async with AsyncRecordClient(["http://a:8000", "http://b:8000"]) as client:
        ...     async with client.drain("0", wait_s=30) as drained:  # doctest: +SKIP
        ...         train(drained.experiences)
    """

    def __init__(
        self,
        base_url: str | Iterable[str],
        *,
        admin_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(base_url, admin_key, timeout, retries)
        self._owns_http = http_client is None
        self._http = http_client or httpx.AsyncClient(limits=LIMITS)

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
        return await self._everywhere(
            calls.update(key, reward, info, record_ids, token_level_reward)
        )

    def drain(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> Draining:
        """See `RecordClient.drain`; either `async with` it, or await it and call `ack`."""
        return Draining(self, calls.drain(prefix, wait_s, lease_s))

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

    async def _everywhere(self, call: Call[Part, Whole]) -> Whole:
        return await self._run(dict.fromkeys(self.urls, call))

    async def _run(self, asked: Mapping[str, Call[Part, Whole]]) -> Whole:
        return conclude(asked, await asyncio.gather(*(self._send(*each) for each in asked.items())))

    async def _send(self, url: str, call: Call[Part, Any]) -> Part | RecorderError:
        pauses = call.pauses(self._retries)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(**self._arguments(url, call))
            except httpx.RequestError as error:
                outcome = error
            pause = next(pauses, None) if is_transient(outcome) else None
            if pause is not None:
                await asyncio.sleep(pause)
            elif isinstance(outcome, httpx.Response) and len(outcome.content) > _LARGE:
                return await asyncio.to_thread(self._read, url, call, outcome)
            else:
                return self._read(url, call, outcome)


class AsyncDrained(DrainedRecords):
    """Drained records; `experiences` are assembled on the caller's thread."""

    def __init__(self, client: AsyncRecordClient, parts: Mapping[str, DrainedPart]) -> None:
        super().__init__(parts)
        self._client = client

    async def ack(self) -> int:
        """See `Drained.ack`."""
        return await self._client._run(self._acks())


class Draining:
    """A drain that is still to be sent: awaited, or entered with `async with`."""

    def __init__(
        self, client: AsyncRecordClient, call: Call[DrainedPart, dict[str, DrainedPart]]
    ) -> None:
        self._client = client
        self._call = call
        self._drained: AsyncDrained | None = None

    async def _send(self) -> AsyncDrained:
        self._drained = AsyncDrained(self._client, await self._client._everywhere(self._call))
        return self._drained

    def __await__(self) -> Generator[Any, None, AsyncDrained]:
        return self._send().__await__()

    async def __aenter__(self) -> AsyncDrained:
        return await self._send()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._drained is not None:
            await self._drained.ack()
