"""The documents' tables of what each version gives."""

from __future__ import annotations

from pathlib import Path

from vllm_recorder import compat


def test_the_tables_say_what_is_supported() -> None:
    root = Path(__file__).parents[2]
    for row in compat.TABLE:
        assert row.row("vLLM") in (root / "README.md").read_text()
        assert row.row("").replace("|  ", "| ") in (root / "docs" / "vllm.md").read_text()
