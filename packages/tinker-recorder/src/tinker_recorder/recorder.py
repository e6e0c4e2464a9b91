"""The recorder for programs that sample through the Tinker SDK."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal

from recorder_core.context import record_key
from recorder_core.errors import RecorderError
from recorder_core.experience import Experience
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import DEFAULT_LEASE_S
from recorder_core.recorder import Recorder, RecorderStats
from recorder_core.records import Record
from recorder_core.stores import Lease, RecordStore
from recorder_core.trajectories import assemble
from tinker_recorder.binding import BoundClient

OnError = Literal["count", "raise"]


class TinkerRecorder:
    """Records what this process samples through the Tinker SDK.

    A sample is recorded under the key in force where it is started: `record_key`, or a client
    bound to a key. Its record is stored before the caller's future completes.

    Args:
        store: Where records go; a `MemoryStore` by default.
        strict: Whether a sample that is started without a record key raises MissingKeyError
            instead of going unrecorded. `skip_recording()` says that it is meant.
        on_error: What happens when a sample cannot be recorded: it is counted and logged, or
            counted, logged and the sample's future raises NotRecordedError.

    Example:
        >>> recorder = TinkerRecorder()  # doctest: +SKIP
        >>> recorder.instrument()
        >>> with recorder.record_key("0/task-7/1"):
        ...     result = client.sample(prompt, num_samples=4, sampling_params=params).result()
    """

    def __init__(
        self,
        store: RecordStore | None = None,
        *,
        strict: bool = False,
        on_error: OnError = "count",
    ) -> None:
        if on_error not in ("count", "raise"):
            raise ValueError(f"on_error is {on_error!r}, it must be 'count' or 'raise'")
        self.recorder = Recorder(store)
        self._strict = strict
        self._raises = on_error == "raise"
        self._hook: Any = None
        self._process = os.getpid()

    @property
    def store(self) -> RecordStore:
        """Where the records are."""
        return self.recorder.store

    def instrument(self) -> None:
        """Record from now on; once is enough, again does nothing.

        Raises:
            UnsupportedEngineError: `tinker` is not the SDK, or not in a supported version.
            RecorderError: Another recorder is instrumented in this process, or this one was made
                in the process that this one was forked from.
        """
        # Importing the SDK takes seconds: not before it is needed.
        from tinker_recorder import compat

        if self._hook is not None and self._hook.active:
            return
        if self._process != os.getpid():
            raise RecorderError(
                "this TinkerRecorder was made before the process was forked, and its thread is not "
                "here: make one in the forked process"
            )
        compat.check_sdk()
        from tinker_recorder.hook import Hook

        hook = Hook(self.recorder, strict=self._strict, raises=self._raises)
        hook.install()
        self._hook = hook

    def uninstrument(self) -> None:
        """Record no more; samples in flight still are. Undoes `instrument`, or does nothing."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def record_key(self, key: RecordKey | str) -> AbstractContextManager[RecordKey]:
        """Record the samples started in this block under a key; see `recorder_core.record_key`."""
        return record_key(key)

    def bind(self, client: Any, key: RecordKey | str) -> Any:
        """A sampling client whose samples are recorded under a key, whatever thread they are on.

        Args:
            client: A sampling client, which itself stays as it is.
            key: The run.

        Raises:
            InvalidKeyError: The text is no record key.
        """
        return BoundClient(client, key)

    def update_reward(
        self, key: RecordKey | str, reward: float, *, info: Mapping[str, Any] | None = None
    ) -> int:
        """Write the reward of a run; returns the number of records updated."""
        return self.store.update(_key(key), reward=reward, info=info)

    def drain(
        self, prefix: str | RecordKey | KeyPrefix = "", *, lease_s: float = DEFAULT_LEASE_S
    ) -> Drained:
        """Take the records under a prefix, for `lease_s` seconds or until they are acknowledged.

        Example:
            >>> with recorder.drain("0") as drained:  # acknowledged when the block ends well
            ...     train(drained.experiences)  # doctest: +SKIP
        """
        wanted = prefix if isinstance(prefix, KeyPrefix) else KeyPrefix(str(prefix))
        self.flush()
        pending = self.recorder.pending(wanted)
        return Drained(self.store, self.store.drain(wanted, lease_s), pending)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every sample that has finished is stored or dropped."""
        return self.recorder.flush(timeout)

    def stats(self) -> RecorderStats:
        """The counters."""
        return self.recorder.stats()

    def close(self, timeout: float = 10.0) -> None:
        """Record no more, and store what is left."""
        self.uninstrument()
        self.recorder.close(timeout)


class Drained:
    """Records taken from a recorder; as a context manager, acknowledged when the block ends well.

    Args:
        store: Where they are from.
        lease: What was taken.
        pending: Samples under the prefix that were still in flight.
    """

    def __init__(self, store: RecordStore, lease: Lease, pending: int) -> None:
        self._store = store
        self._lease = lease
        self.pending = pending

    @property
    def records(self) -> list[Record]:
        """By key, parents before the records that continue them."""
        return list(self._lease.records)

    @cached_property
    def experiences(self) -> list[Experience]:
        """The records assembled, on first use; see `recorder_core.assemble`."""
        return assemble(self._lease.records)

    def ack(self) -> int:
        """They are safe with the caller: forget them; returns how many.

        Raises:
            LeaseError: The lease has run out, and they are back in the store.
        """
        return self._store.ack(self._lease.id)

    def __enter__(self) -> Drained:
        """Nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Acknowledge, unless the block raised."""
        if kind is None:
            self.ack()


def with_text(records: Iterable[Record], tokenizer: Any) -> list[Record]:
    """The records with the texts of what each keeps: its new prompt tokens and its response.

    Nothing is decoded while sampling, as the SDK may fetch a tokenizer over the network.

    Args:
        records: Records, or all of a drain.
        tokenizer: What decodes: a tokenizer, or a sampling client, whose tokenizer is then loaded.
    """
    load = getattr(tokenizer, "get_tokenizer", None)
    decoder = load() if load is not None else tokenizer

    def decode(ids: Any) -> str:
        # Placeholders of images stand for no token.
        return str(decoder.decode(ids[ids >= 0].tolist()))

    return [
        record.model_copy(
            update={
                "prompt_text": decode(record.prompt_ids),
                "response_text": decode(record.response_ids),
            }
        )
        for record in records
    ]


def _key(key: RecordKey | str) -> RecordKey:
    return key if isinstance(key, RecordKey) else RecordKey.parse(key)
