"""Where an engine serves its API and `/records`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from recorder_core.client import AsyncRecordClient
from recorder_core.rollout.task import Task


class EngineAddress(BaseModel):
    """Where one replica of the served model is, and what it takes to talk to it.

    Example:
        >>> EngineAddress(base_url="http://gpu-0:8000", model_name="policy").agent_url
        'http://gpu-0:8000/v1'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """`http://host:8000`, with or without `/v1`."""
    model_name: str
    """The model's name in the API."""
    admin_key: str | None = Field(default=None, repr=False)
    """The server's `--recording-admin-key`; None: from `RECORDER_ADMIN_KEY`."""
    engine_key: str | None = Field(default=None, repr=False)
    """The engine's own `--api-key`, if it has one."""

    @property
    def agent_url(self) -> str:
        """The base URL for an agent's OpenAI client."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1"

    def api_key(self, task: Task) -> str:
        """The API key with which an agent is recorded as this run."""
        key = task.signed_key
        return key if self.engine_key is None else f"{self.engine_key}:{key}"

    def records(self) -> AsyncRecordClient:
        """A new client of this replica's records."""
        return AsyncRecordClient(self.base_url, admin_key=self.admin_key)
