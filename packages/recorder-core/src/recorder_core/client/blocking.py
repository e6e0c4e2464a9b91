"""The client for ordinary code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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

_MAX_THREADS = 32


class RecordClient(Servers):
    """Reads and writes the records of one or many servers as if they were one.

    With many servers each call goes to all of them at once, a thread each. Where some fail, the
    first error is raised, by its type, after all have answered; its message names every server
    that failed. Calls that do no harm twice are sent again when the connection breaks or a proxy
    answers 502, 503 or 504; a drain never is. A count may miss what an attempt did whose reply
    was lost.

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

    Every method raises `ServerUnreachableError`, `NotAuthorizedError`, `BadRequestError`
    or `ServerFaultError` (all `ClientError`), and `InvalidKeyError` for what is no key or prefix.
    """

    def __init__(
        self,
        base_url: str | Iterable[str],
        *,
        admin_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        http_client: httpx.Client | None = None,
    ) -> None:
        super().__init__(base_url, admin_key, timeout, retries)
        self._owns_http = http_client is None
        self._http = http_client or httpx.Client(limits=LIMITS)

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

    def drain(
        self, prefix: Prefix, *, wait_s: float = 0.0, lease_s: float = DEFAULT_LEASE_S
    ) -> Drained:
        """Take the records under a prefix.

        Used in a `with` statement, the records are acknowledged when the block ends well. When it
        raises they are not: they come back, with their rewards, when the lease ends. So they do
        when the reply is lost, and when some of many servers fail: the error is raised, and what
        the others handed out is drained again after `lease_s`. Without `with`, call `ack`.

        Args:
            prefix: Leading components of the keys; the empty text takes everything.
            wait_s: Seconds to wait for generations in flight under the prefix.
            lease_s: Seconds to use the records in, before they come back.
        """
        return Drained(self, self._everywhere(calls.drain(prefix, wait_s, lease_s)))

    def overwrite(self, key: Key, records: Iterable[Record]) -> int:
        """Replace all that a key has, on every server, by these records.

        With many servers the first one takes the records, and then the key is emptied on the
        others. Records that the first refuses change nothing anywhere; where one of the others
        fails it still has its old records, and the call is to be repeated.

        Returns:
            The number of records written.
        """
        first, *others = self.urls
        written = self._run({first: calls.overwrite(key, records)})
        if others:
            # Not a delete, whose prefix could match longer keys too.
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

    def _everywhere(self, call: Call[Part, Whole]) -> Whole:
        return self._run(dict.fromkeys(self.urls, call))

    def _run(self, asked: Mapping[str, Call[Part, Whole]]) -> Whole:
        if len(asked) == 1:
            return conclude(asked, [self._send(*each) for each in asked.items()])
        with ThreadPoolExecutor(min(len(asked), _MAX_THREADS)) as threads:
            return conclude(asked, threads.map(self._send, asked.keys(), asked.values()))

    def _send(self, url: str, call: Call[Part, Any]) -> Part | RecorderError:
        pauses = call.pauses(self._retries)
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


class Drained(DrainedRecords):
    """Drained records; as a context manager, acknowledged when the block ends well."""

    def __init__(self, client: RecordClient, parts: Mapping[str, DrainedPart]) -> None:
        super().__init__(parts)
        self._client = client

    def ack(self) -> int:
        """The records are safe here: let the servers forget them. Twice is no error.

        Returns:
            The number of records forgotten by this call.

        Raises:
            LeaseError: A lease has run out: that server's records will be drained again.
        """
        return self._client._run(self._acks())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.ack()
