"""The sampling client that the server samples with, and its replacement while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

from tinker_recorder.turns import Weights


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
