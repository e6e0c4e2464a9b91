"""Where records wait for the trainer: the `RecordStore` protocol and the stores that keep it."""

from recorder_core.stores.base import (
    AddOutcome,
    Lease,
    RecordStore,
    RunSummary,
    StoreStats,
    Updated,
    in_order,
    updated_records,
)
from recorder_core.stores.memory import MemoryStore

__all__ = [
    "AddOutcome",
    "Lease",
    "MemoryStore",
    "RecordStore",
    "RunSummary",
    "StoreStats",
    "Updated",
    "in_order",
    "updated_records",
]
