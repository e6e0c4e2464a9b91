"""What became of the experiences that were given, in numbers that add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Report:
    """Counts of rows and tokens.

    `experiences == rows + sum(dropped.values())`, and
    `sampled_tokens == trained_tokens + sum(masked_tokens.values()) + sum(dropped_tokens.values())`.
    A row or token that several rules would take out counts under the first.
    """

    experiences: int = 0
    """Trajectories given."""
    runs: int = 0
    """Runs that they belong to."""
    rows: int = 0
    """Rows of the batch."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Trajectories left out, by the name of the rule."""
    sampled_tokens: int = 0
    """Tokens that the given trajectories want trained."""
    trained_tokens: int = 0
    """Tokens that the rows train."""
    masked_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens taken out of rows, by the name of the rule."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of trajectories that were left out, by the name of the rule."""

    def metrics(self) -> dict[str, float]:
        """The report as plain numbers, for any tracker."""
        numbers: dict[str, float] = {
            "export/experiences": self.experiences,
            "export/runs": self.runs,
            "export/rows": self.rows,
            "export/tokens": self.sampled_tokens,
            "export/tokens/trained": self.trained_tokens,
        }
        for name in ("dropped", "masked_tokens", "dropped_tokens"):
            counts: Counter[str] = getattr(self, name)
            numbers |= {f"export/{name}/{reason}": n for reason, n in counts.items()}
        return numbers
