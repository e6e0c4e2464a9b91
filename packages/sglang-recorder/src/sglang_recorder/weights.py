"""What the engine's weights are called, and what a change of them does to generations in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import sglang

from recorder_core.records import VersionSpan
from sglang_recorder import compat

IN_PLACE_UPDATE = "in_place_weight_update"
"""A record's flag: weights were replaced under a generation that kept its old KV cache, so the
tokens after the switch come from neither checkpoint."""
STALE_CACHE = "stale_prefix_cache"
"""A record's flag: the KV cache it may have used was computed by earlier weights."""
APPROXIMATE = "version_boundary_approximate"
"""A record's flag: weights changed within it, at about the token that its spans say."""


class Label(NamedTuple):
    """What the weights are called: as the engine was told, and what it was not told since."""

    told: str
    untold: int = 0
    """Changes of the weights since, for which no label was given."""

    def __str__(self) -> str:
        """The label of a record's span."""
        return f"{self.told}+{self.untold}" if self.untold else self.told


class LabelsInForce:
    """The labels in force while one generation ran.

    Args:
        label: That of its beginning.
    """

    __slots__ = ("_labels",)

    def __init__(self, label: Label) -> None:
        self._labels = [(0, label)]

    def change(self, label: Label, position: int) -> None:
        """Another label, if it is one, is in force from the output token `position` on."""
        if label != self._labels[-1][1]:
            self._labels.append((position, label))

    def spans(
        self, engine: Iterable[Any] | None, count: int
    ) -> tuple[tuple[VersionSpan, ...], tuple[str, ...]]:
        """The spans over `count` output tokens, and a flag if a boundary is not the engine's.

        Args:
            engine: The engine's own spans, which are exact and do not know what it was not told;
                None where it gives none.
            count: Those that reached the client.
        """
        if engine is None:
            found = [(start, end, str(label)) for start, end, label in self._pieces(0, count)]
        else:
            found = [
                # Another label than the engine's was told a moment before or after.
                (start, end, str(label) if label.told == span.version else span.version)
                for span in engine
                for start, end, label in self._pieces(span.start, min(span.end, count))
            ]
        guessed = any(
            start < count and (engine is None or label.told == before.told)
            for (_, before), (start, label) in pairwise(self._labels)
        )
        return _merged(found), (APPROXIMATE,) if guessed else ()

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int, Label]]:
        """The labels in force over the output tokens `[begin, end)`."""
        starts = [min(max(start, begin), end) for start, _ in self._labels]
        pieces = zip(starts, [*starts[1:], end], self._labels, strict=True)
        return [(start, stop, label) for start, stop, (_, label) in pieces if start < stop]


def _merged(found: Iterable[tuple[int, int, str]]) -> tuple[VersionSpan, ...]:
    """Spans of which neighbours differ; tokens under no label are in none."""
    spans: list[VersionSpan] = []
    for start, end, label in found:
        if spans and spans[-1].version == label and spans[-1].end == start:
            spans[-1] = spans[-1]._replace(end=end)
        elif label:
            spans.append(VersionSpan(start, end, label))
    return tuple(spans)


class Weights:
    """The weights of one tokenizer manager's engine.

    Args:
        manager: SGLang's `TokenizerManager`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.are_reported = compat.reports_spans(compat.SUPPORT.check_version(sglang.__version__))
        """Whether the scheduler says which label sampled each token."""
        self.cache_is_stale = False
        """Whether KV cache of earlier weights is left."""
        self._pause_mode = ""
        self._told = self._seen = self._told_here()
        self._untold: Counter[str | None] = Counter()
        """Changes without a label, since the last one: of an adapter, or with None of the model."""

    def _told_here(self) -> str:
        """What the engine was told in this process; others may have told it more."""
        manager = self._manager
        if hasattr(manager, "config_value"):
            return str(manager.config_value("weight_version") or "")
        return str(manager.server_args.weight_version or "")

    def label(self, adapter: str | None) -> Label:
        """What the weights that sample now are called."""
        return Label(self._told, self._untold[None] + (self._untold[adapter] if adapter else 0))

    def told(self, label: str) -> None:
        """The engine was told a label, be it the same one."""
        self._told, self._seen = label, self._told_here()
        self._untold.clear()

    def are_relabelled(self) -> bool:
        """See whether the engine was told another label."""
        if self._told_here() == self._seen:
            return False
        self.told(self._told_here())
        return True

    def changed(self, adapter: str | None = None) -> None:
        """The model's weights, or those of an adapter, are others, and nobody named them."""
        self.are_relabelled()
        self._untold[adapter] += 1

    def pause(self, mode: str) -> None:
        """Generation is paused, or goes on with the empty mode."""
        self._pause_mode = mode

    def about_to_change(self, *, flushes_cache: bool) -> str | None:
        """New weights are about to be put in place; the flag of the generations in flight."""
        in_place = self._pause_mode == "in_place"
        self.cache_is_stale = in_place or not flushes_cache
        if in_place:
            return IN_PLACE_UPDATE
        return STALE_CACHE if self.cache_is_stale else None

    def cache_flushed(self) -> None:
        """No KV cache of earlier weights is left."""
        self.cache_is_stale = False
