"""Server-sent events, as servers stream their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, as they come.

    Lines end in line feeds alone: text that is sampled holds other separators, which JSON may keep
    as they are and `iter_lines` takes for ends.
    """
    rest = ""
    for text in response.iter_text():
        *lines, rest = (rest + text).split("\n")
        for line in map(str.rstrip, lines):
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
