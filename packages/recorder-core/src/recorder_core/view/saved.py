"""The page with its runs in one file, which a browser opens without a server.

The file is the page's own files put into one, and the answers of the routes that it reads as blocks
of JSON. A browser runs the one script and the one style of the file, by their hashes, and loads
nothing: what a model wrote is data in a block that no text of its can end.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import numpy as np

from recorder_core.codec import encode_hook
from recorder_core.recent import Generation, News, Recent, RunChange
from recorder_core.runs import Run
from recorder_core.view.forest import all_arrays, forest_of
from recorder_core.view.pieces import NoPiecesError, Pieces, known_pieces
from recorder_core.view.static_files import static_files

_MAIN, _API, _SAVED = "app.js", "api.js", "saved.js"
_IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{[^}]+\})) from "\./(\w+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function|async function) ([\w$]+))", re.MULTILINE)


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> Any:
        """Take them."""
        ...


def save(runs: Iterable[Run], to: Sink, pieces: Pieces) -> int:
    """Write the page with runs; returns how many. They are held one at a time.

    Args:
        runs: Keys in order.
        to: The file.
        pieces: The bytes of token ids; where it raises `NoPiecesError` the page shows ids, and why.
    """
    before, after = _page()
    to.write(before)
    index = _Index()
    for run in runs:
        block = {"forest": forest_of(run, texts=True), "tokens": all_arrays(run)}
        to.write(_block('class="saved-run"', block))
        index.add(run)
    to.write(_block('id="saved-index"', index.made(pieces)))
    to.write(after)
    return len(index.keys)


class _Index:
    """What the page asks for that is about all runs."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self._ids: set[int] = set()
        self._generations: list[Generation] = []
        self._changes: list[RunChange] = []
        self._bytes = 0

    def add(self, run: Run) -> None:
        recent = Recent(max_generations=max(len(run.records), 1))
        for record in sorted(run.records.values(), key=lambda each: each.finished_at):
            recent.add(record)
            self._ids.update(np.unique(record.new_ids).tolist())
        self._generations += recent.since("", len(run.records)).generations
        rewards = [each.reward for each in run.records.values()] + [run.reward]
        given = [each for each in rewards if each is not None]
        self._changes += [RunChange(0, run.key.text, reward) for reward in given]
        self._bytes += run.nbytes
        self.keys.append(
            {
                "key": run.key,
                "records": len(run.records),
                "rewarded": run.rewarded,
                "reward": run.reward,
                "pending": run.pending,
                "missing": run.missing,
                "closed": run.closed,
            }
        )

    def made(self, pieces: Pieces) -> dict[str, Any]:
        known, reason = None, ""
        try:
            known = known_pieces(pieces, self._ids)
        except NoPiecesError as error:
            reason = str(error)
        records = len(self._generations)
        generations = sorted(self._generations, key=lambda each: each.finished_at)
        numbered = [
            msgspec.structs.replace(each, seq=number) for number, each in enumerate(generations, 1)
        ]
        changes = [
            msgspec.structs.replace(each, seq=number)
            for number, each in enumerate(self._changes, records + 1)
        ]
        return {
            "keys": self.keys,
            "news": News(f"saved.{records + len(changes)}", False, numbered, changes),
            "stats": {
                "recorder": {"pending": 0, "dropped": {}},
                "store": {"records": records, "bytes": self._bytes, "counters": {}},
                "sources": ["a saved page"],
            },
            "pieces": known,
            "reason": reason,
        }


def _block(attributes: str, value: Any) -> bytes:
    """Data in a page: no text in it can end the block, or begin a comment."""
    content = msgspec.json.encode(value, enc_hook=encode_hook).replace(b"<", b"\\u003c")
    return b'<script type="application/json" %s>%s</script>\n' % (attributes.encode(), content)


def _page() -> tuple[bytes, bytes]:
    """The page before and after its data."""
    files = {name: content.decode() for name, content in static_files().items()}
    files[_API] = files[_SAVED]
    style, script = files["style.css"], _bundled(files)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    icon = base64.b64encode(files["icon.svg"].encode()).decode()
    page = files["index.html"]
    for part, instead in (
        ("<head>", f'<head>\n    <meta http-equiv="Content-Security-Policy" content="{policy}" />'),
        ('href="view/icon.svg"', f'href="data:image/svg+xml;base64,{icon}"'),
        ('<link rel="stylesheet" href="view/style.css" />', f"<style>{style}</style>"),
        ('<script type="module" src="view/app.js"></script>', ""),
    ):
        assert page.count(part) == 1, part
        page = page.replace(part, instead)
    before, end, after = page.partition("</body>")
    return before.encode(), f'<script type="module">{script}</script>\n{end}{after}'.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _bundled(files: dict[str, str]) -> str:
    """The page's modules as one: a browser imports none from beside a file.

    Each but the main one becomes a function that gives its exports.
    """
    done: dict[str, str] = {}

    def put(name: str) -> None:
        text = files[name]
        for found in _IMPORT.finditer(text):
            if found[3] not in done:
                put(found[3])
        text = _IMPORT.sub(lambda found: f"const {found[1] or found[2]} = {_name(found[3])};", text)
        names = ", ".join(found[1] for found in _EXPORT.finditer(text))
        text = _EXPORT.sub("", text)
        wrapped = f"const {_name(name)} = (() => {{\n{text}\nreturn {{ {names} }};\n}})();\n"
        done[name] = text if name == _MAIN else wrapped

    put(_MAIN)
    return "".join(done.values())


def _name(file: str) -> str:
    return f"module_{file.removesuffix('.js')}"
