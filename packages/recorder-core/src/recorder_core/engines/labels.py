"""Weight labels stamped on generations in flight, where the engine reports no spans itself."""

from __future__ import annotations

from recorder_core.records import VersionSpan


class VersionLabels:
    """The weight labels in force while one generation ran, where the engine reports no spans.

    Args:
        label: The label when the generation began; empty if there is none.
    """

    __slots__ = ("_labels",)

    def __init__(self, label: str) -> None:
        # (label, first output token); the empty label where it is not known.
        self._labels: list[tuple[str, int]] = [(label, 0)]

    def change(self, label: str, position: int) -> None:
        """Another label is in force from the output token `position` on."""
        self._labels.append((label, position))

    def spans(self, count: int) -> tuple[tuple[VersionSpan, ...], tuple[str, ...]]:
        """The spans over `count` output tokens, and a flag if a boundary lies within them.

        The label changed on the API server's side; tokens then in flight may have been sampled
        before.
        """
        starts = [*(min(start, count) for _, start in self._labels), count]
        found = tuple(
            VersionSpan(start, end, label)
            for (label, start), end in zip(self._labels, starts[1:], strict=True)
            if label and start < end
        )
        changed = any(start < count for start in starts[1:])
        return found, ("version_boundary_approximate",) if changed else ()
