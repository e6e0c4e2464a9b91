"""Why a generation is not recorded, and whether its run is the poorer for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class DropReason(str, Enum):
    """Why a generation is not recorded."""

    ABORTED = "aborted"
    """Aborted after its first token, where the operator keeps none such."""
    EMPTY = "empty"
    """It ended before a token was sampled."""
    NO_SAMPLE = "no_sample"
    """The engine sampled a token that no client is given: a score, an echo, a warm-up."""
    PREFILL = "prefill"
    """The first half of a request that another engine decodes."""
    BEAM_SEARCH = "beam_search"
    """A beam is no sample of the policy."""
    PROMPT_EMBEDS = "prompt_embeds"
    """The prompt has no token ids."""
    PROMPT_UNKNOWN = "prompt_unknown"
    """The engine put tokens before the prompt that were not seen."""
    STREAMING_INPUT = "streaming_input"
    """The prompt grew while the response was generated."""
    REJECTED = "rejected"
    """The engine refused the request."""
    NOT_SENT = "not_sent"
    """The request did not reach the engine."""
    FAILED = "failed"
    """The call failed."""
    CANCELLED = "cancelled"
    """The caller cancelled the call."""
    NOT_RETURNED = "not_returned"
    """The engine returned fewer samples than were asked for."""
    BLOCKED = "blocked"
    """Its key is under a blocked prefix."""
    FULL = "full"
    """The store's byte budget has no room."""
    DISK = "disk"
    """The store's disk takes no more: it is full, or cannot be written."""
    QUEUE_FULL = "queue_full"
    """Too many tokens wait for the recorder's thread."""
    STORE_DOWN = "store_down"
    """The recorder process of several front ends was not there."""
    CLOSED = "closed"
    """The recorder was closed."""
    LOST = "lost"
    """The engine forgot the request."""
    NO_PARENT = "no_parent"
    """The store wants a parent for a root: a fault of the store."""
    ERROR = "error"
    """An exception, which is logged."""

    @property
    def cuts(self) -> bool:
        """Whether the run lacks a turn for it, so that later prompts hold text from nowhere."""
        return self in _CUTTING


_CUTTING = frozenset(
    {
        DropReason.BEAM_SEARCH,
        DropReason.PROMPT_EMBEDS,
        DropReason.PROMPT_UNKNOWN,
        DropReason.STREAMING_INPUT,
        DropReason.NOT_RETURNED,
        DropReason.FULL,
        DropReason.DISK,
        DropReason.QUEUE_FULL,
        DropReason.STORE_DOWN,
        DropReason.LOST,
        DropReason.NO_PARENT,
        DropReason.ERROR,
    }
)

_HARMLESS = frozenset(reason.value for reason in DropReason if not reason.cuts)


def cutting(dropped: Mapping[str, int]) -> dict[str, int]:
    """Of the counts by reason: those that say that the run lacks turns.

    A reason that is not known here, from a server of a later release, may be one of them.
    """
    return {name: count for name, count in dropped.items() if name not in _HARMLESS}
