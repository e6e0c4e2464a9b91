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

from recorder_core.client.asynchronous import AsyncDrained, AsyncRecordClient
from recorder_core.client.blocking import Drained, RecordClient
from recorder_core.client.drains import ServerLease

__all__ = ["AsyncDrained", "AsyncRecordClient", "Drained", "RecordClient", "ServerLease"]
