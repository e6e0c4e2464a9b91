"""The way to an engine's records, for workflows, schedulers and trainers.

Needs the extra `recorder-core[client]`; nothing else in the package imports httpx.
"""

try:
    import httpx as _httpx  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "recorder_core.client needs httpx, which is not installed: "
        'pip install "recorder-core[client]"'
    ) from error

from recorder_core.client.clients import AsyncRecordClient, RecordClient
from recorder_core.drained import Drained, ServerLease

__all__ = ["AsyncRecordClient", "Drained", "RecordClient", "ServerLease"]
