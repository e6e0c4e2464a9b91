"""The recorder for programs that sample through the Tinker SDK."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

from recorder_core.context import record_key
from recorder_core.errors import RecorderError
from recorder_core.keys import RecordKey
from recorder_core.local import LocalRecords
from recorder_core.recorder import Recorder
from recorder_core.records import Record
from recorder_core.stores import RecordStore
from tinker_recorder.binding import BoundClient

OnError = Literal["count", "raise"]


class TinkerRecorder(LocalRecords):
    """Records what this process samples through the Tinker SDK; see `LocalRecords` for the rest.

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
        super().__init__(Recorder(store))
        self._strict = strict
        self._raises = on_error == "raise"
        self._hook: Any = None
        self._process = os.getpid()

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

    def close(self, timeout: float = 10.0) -> None:
        """Record no more, and store what is left."""
        self.uninstrument()
        super().close(timeout)


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
        record.replace(
            prompt_text=decode(record.prompt_ids), response_text=decode(record.response_ids)
        )
        for record in records
    ]
