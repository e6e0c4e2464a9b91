"""Which weights each sampling client samples from.

The SDK's client keeps only the id of its sampling session. What `SamplingClient.create` was told is
remembered; for other clients (unpickled ones, those of `save_weights_and_get_sampling_client`) the
server is asked once, and no thread waits for its answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import tinker
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

from recorder_core.throttle import Throttle
from tinker_recorder.turns import Weights

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 10.0
"""How long a finished sample waits for the name of its weights."""

LOWER_BOUND = "version_lower_bound"
"""Flags samples whose weights may be newer than their version says."""
UNKNOWN = Weights(None, ("version_unknown",))

_HAS_KINDS = hasattr(types, "SamplingClientKind")

saving_kind: ContextVar[str | None] = ContextVar("tinker_recorder_saving_kind", default=None)
"""The kind of sampling client that is being created here, where that is known."""


class Samplers:
    """The weights of the clients of this process."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Weights] = weakref.WeakKeyDictionary()
        self._asked: weakref.WeakKeyDictionary[Any, Future[Any]] = weakref.WeakKeyDictionary()
        self._kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a weak reference may be cleared while it is held
        self._warn = Throttle(logger)

    def created(self, client: Any, label: str | None, kind: str | None) -> None:
        """A client has been made.

        Args:
            client: The client.
            label: The sampler path or base model that it was made from; None: an existing session.
            kind: Of the session, where that is known.
        """
        with self._lock:
            if label is not None:
                self._known[client] = Weights(label)
                return
            if kind is not None:
                self._kinds[client] = kind
        self.expect(client)

    def expect(self, client: Any) -> None:
        """The client's weights will be wanted: if they are not known, the server is asked now."""
        with self._lock:
            if client not in self._known and client not in self._asked:
                rest = RestClient(client.holder)
                self._asked[client] = rest.get_sampler(client._sampling_session_id).future()

    def then(self, client: Any, use: Callable[[Weights], None]) -> None:
        """Call `use` with the client's weights: at once, or when the server has answered.

        To be called on the SDK's event loop.
        """
        self.expect(client)
        with self._lock:
            known, asked = self._known.get(client), self._asked.get(client)
        if known is not None or asked is None:
            use(known or UNKNOWN)
            return
        once = threading.Lock()

        def answered(future: Future[Any]) -> None:
            weights = self._read(client, future)
            if once.acquire(blocking=False):
                use(weights)

        def give_up() -> None:
            if once.acquire(blocking=False):
                use(UNKNOWN)

        asked.add_done_callback(answered)
        if not asked.done():
            with suppress(RuntimeError):  # no event loop here
                asyncio.get_running_loop().call_later(LOOKUP_TIMEOUT_S, give_up)

    def _read(self, client: Any, future: Future[Any]) -> Weights:
        try:
            answer = future.result()
        except Exception as error:  # noqa: BLE001 - a record without a version beats no sample
            self._warn.warning("the weights of a sampling client are not known: %r", error)
            with self._lock:
                if isinstance(error, tinker.APIStatusError) and error.status_code < 500:
                    self._known[client] = UNKNOWN  # it will not say
                self._asked.pop(client, None)
            return UNKNOWN
        with self._lock:
            kind = self._kinds.get(client)
            # Where a client's kind is not known, an in-flight one cannot be ruled out.
            fixed = kind == "snapshot" or not _HAS_KINDS or answer.model_path is None
            weights = Weights(
                answer.model_path or answer.base_model, () if fixed else (LOWER_BOUND,)
            )
            self._known[client] = weights
            self._asked.pop(client, None)
        return weights
