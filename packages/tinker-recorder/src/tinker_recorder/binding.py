"""Sampling clients bound to a record key."""

from __future__ import annotations

from typing import Any

from recorder_core.context import record_key
from recorder_core.keys import RecordKey


class BoundClient:
    """A sampling client whose samples are recorded under one key.

    Threads of a pool do not inherit the key in force where work is handed to them; this carries it.
    Everything but sampling is the client's own, and it passes for one (`isinstance`). It can be
    pickled, key included.

    Args:
        client: The sampling client.
        key: The run; it wins over a key in force where a sample is started.
    """

    def __init__(self, client: Any, key: RecordKey | str) -> None:
        self._client = client
        self._key = key if isinstance(key, RecordKey) else RecordKey.parse(key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The client's."""
        return type(self._client)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As the client's, under the key."""
        with record_key(self._key):
            return self._client.sample(*args, **kwargs)

    async def sample_async(self, *args: Any, **kwargs: Any) -> Any:
        """As the client's, under the key."""
        with record_key(self._key):
            return await self._client.sample_async(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (BoundClient, (self._client, self._key))

    def __repr__(self) -> str:
        return f"BoundClient({self._client!r}, {str(self._key)!r})"
