"""The sampling client that the server samples with, and its replacement while it runs."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

from recorder_core.errors import ServerUnreachableError
from tinker_recorder.turns import Weights

logger = logging.getLogger(__name__)


class Sampler(NamedTuple):
    """A sampling client and what it samples from."""

    client: Any
    weights: Weights


class SamplerPool:
    """Makes sampling clients of one service; the methods wait for it.

    Args:
        base_model: The name of the base model that is sampled at first.
        model_path: Or the sampler path, `tinker://...`.
        base_url: The service; by default the SDK's own choice.
        api_key: Tinker's key; by default `TINKER_API_KEY`.
    """

    def __init__(
        self,
        base_model: str | None = None,
        model_path: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        given = {"base_url": base_url, "api_key": api_key}
        self._service = tinker.ServiceClient(**{k: v for k, v in given.items() if v is not None})
        self.current = self._make(base_model, model_path)
        self.base_model = base_model or self._base_model(self.current.client)

    def swap(self, model_path: str) -> Sampler:
        """Sample from other weights from now on; what is in flight ends with the old ones.

        Raises:
            Exception: The service does not know them; the SDK's own, whatever its type.
        """
        sampler = self._make(None, model_path)
        # Older SDKs make a client of any path, and its first sample would fail.
        self._base_model(sampler.client)
        self.current = sampler
        return sampler

    def tokenizer(self, name: str | None = None) -> Any:
        """The tokenizer of the base model, or the one of that name or folder."""
        from transformers import AutoTokenizer

        if name is None and not Path(self.base_model).is_dir():
            # The SDK knows where the tokenizers of the models that it serves are.
            return self.current.client.get_tokenizer()
        return AutoTokenizer.from_pretrained(name or self.base_model)

    def _make(self, base_model: str | None, model_path: str | None) -> Sampler:
        if model_path is not None:
            made = self._service.create_sampling_client(model_path=model_path)
        else:
            made = self._service.create_sampling_client(base_model=base_model)
        # Newer SDKs give a future of the client.
        client = made.result() if isinstance(made, tinker.APIFuture) else made
        return Sampler(client, Weights(model_path or base_model))

    def _base_model(self, client: Any) -> str:
        rest = RestClient(client.holder)
        return str(rest.get_sampler(client._sampling_session_id).result().base_model)


def connect(
    base_model: str | None, model_path: str | None, *, base_url: str | None, timeout_s: float
) -> SamplerPool:
    """A pool, or an error in time: the SDK itself goes on trying, and says nothing.

    Args:
        base_model: As for the pool.
        model_path: As for the pool.
        base_url: As for the pool.
        timeout_s: Seconds until the service must have answered.

    Raises:
        ServerUnreachableError: It did not, or not with a sampler.
    """
    where = base_url or os.environ.get("TINKER_BASE_URL") or "the SDK's own address"
    what = model_path or base_model
    logger.info("Connecting to Tinker at %s for %s", where, what)
    made: Future[SamplerPool] = Future()

    def make() -> None:
        try:
            made.set_result(SamplerPool(base_model, model_path, base_url=base_url))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            made.set_exception(error)

    # A daemon: it cannot be stopped, and must not keep the process.
    thread = threading.Thread(target=make, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made.done():
        raise ServerUnreachableError(
            f"Tinker at {where} did not answer within {timeout_s:g} s. Is the address right "
            "(--base-url, TINKER_BASE_URL), and the service up? --connect-timeout waits longer"
        )
    error = made.exception()
    if error is not None:
        raise ServerUnreachableError(
            f"Tinker at {where} gives no sampler for {what}: {error}"
        ) from error
    return made.result()
