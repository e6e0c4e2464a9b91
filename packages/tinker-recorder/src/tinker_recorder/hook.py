"""Patches the SDK's public `SamplingClient.sample` and `.create`; the only code that does.

`sample_async` and the clients that are futures of clients go through `sample` too, and
`compute_logprobs` does not: one call is recorded once, and only calls that sample are.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import tinker

from recorder_core.context import MISSING, SKIPPED, current_identity
from recorder_core.drops import DropReason
from recorder_core.errors import MissingKeyError, RecorderError
from recorder_core.recorder import Recorder
from tinker_recorder import compat
from tinker_recorder.futures import Finish, chained
from tinker_recorder.samplers import Samplers, saving_kind
from tinker_recorder.turns import Call, read_prompt

_installed: Hook | None = None
_lock = threading.Lock()


class Hook:
    """Records the samples of every sampling client in this process.

    Args:
        recorder: Where turns go.
        strict: Whether a sample without a record key is refused.
        raises: Whether a sample that could not be recorded fails.
    """

    def __init__(self, recorder: Recorder, *, strict: bool, raises: bool) -> None:
        self.recorder = recorder
        self._strict = strict
        self._raises = raises
        self._samplers = Samplers()
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._active = False

    def install(self) -> None:
        """Patch the SDK.

        Raises:
            RecorderError: Another recorder has.
        """
        global _installed
        with _lock:
            if _installed is not None and _installed._process == os.getpid():
                raise RecorderError(
                    "another TinkerRecorder is instrumented here: uninstrument() it first"
                )
            compat.check_sdk()
            self._patch(tinker.SamplingClient, "sample", self._sample)
            self._patch(tinker.SamplingClient, "create", self._create)
            if hasattr(tinker.types, "SamplingClientKind"):
                self._patch(
                    tinker.TrainingClient, "save_weights_and_get_sampling_client", self._save
                )
            self._active = True
            _installed = self

    def remove(self) -> None:
        """Undo `install`; samples in flight are still recorded."""
        global _installed
        with _lock:
            self._active = False
            for undo in self._undo:
                undo()
            self._undo.clear()
            if _installed is self:
                _installed = None

    @property
    def active(self) -> bool:
        """Whether samples of this process are recorded."""
        # A forked child has the patches and not the recorder's thread.
        return self._active and self._process == os.getpid()

    def _patch(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        described = vars(owner)[name]
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        ours: Any = staticmethod(patched) if isinstance(described, staticmethod) else patched
        setattr(owner, name, ours)

        def undo() -> None:
            # Patched over by someone else, ours stays beneath theirs, and does nothing.
            if vars(owner)[name] is ours:
                setattr(owner, name, described)

        self._undo.append(undo)

    def _sample(
        self,
        original: Callable[..., Any],
        client: Any,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = self._started(num_samples, sampling_params) if self.active else None
        try:
            future = original(client, prompt, num_samples, sampling_params, *args, **kwargs)
        except BaseException:
            if call is not None:
                call.drop(DropReason.FAILED)
            raise
        if call is None:
            return future
        try:
            call.prompt = read_prompt(prompt)
            self._samplers.expect(client)
            return chained(future, functools.partial(self._sampled, client, call), call.drop)
        except Exception:  # noqa: BLE001 - the sample comes first: counted and logged, never raised
            self.recorder.count_error("a sample was not recorded")
            call.drop(DropReason.ERROR)
            return future

    def _started(self, num_samples: int, params: Any) -> Call | None:
        identity = current_identity() or MISSING
        if identity.key is None:
            if self._strict and identity is not SKIPPED:
                raise MissingKeyError(
                    "no record key is in force where this sample is started: use `with "
                    "recorder.record_key(...)`, or recorder.bind(client, key) in thread pools"
                )
            self.recorder.count_unkeyed(identity.reason, identity.detail)
            return None
        try:
            return Call(self.recorder, identity, num_samples, params, raises=self._raises)
        except Exception:  # noqa: BLE001 - what is wrong with the arguments, the SDK will say
            self.recorder.count_error("a sample is not recorded")
            return None

    def _sampled(self, client: Any, call: Call, response: Any, finish: Finish) -> None:
        try:
            self._samplers.then(client, lambda weights: call.finish(response, weights, finish))
        except Exception:  # noqa: BLE001 - the sample comes first: counted and logged, never raised
            self.recorder.count_error("a sample was not recorded")
            call.drop(DropReason.ERROR)
            finish(None)

    def _create(
        self,
        original: Callable[..., Any],
        holder: Any,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        future = original(
            holder,
            model_path=model_path,
            base_model=base_model,
            sampling_session_id=sampling_session_id,
            **kwargs,
        )
        if not self.active:
            return future
        # A base model beside a session says nothing of the weights that the session has.
        base = base_model if sampling_session_id is None else None
        kind = saving_kind.get()

        def created(client: Any, finish: Finish) -> None:
            try:
                self._samplers.created(client, model_path or base, kind)
            except Exception:  # noqa: BLE001 - asked again with the first sample
                self.recorder.count_error("the weights of a sampling client are not known")
            finish(None)

        return chained(future, created)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The SDK creates the client in a task that copies this context.
        kind = kwargs.get("kind", args[4] if len(args) > 4 else "snapshot")
        token = saving_kind.set(str(kind))
        try:
            return original(*args, **kwargs)
        finally:
            saving_kind.reset(token)
