"""The built manual: it asks nobody else for anything, and its reference has every public name.

`make docs` builds it and runs this; mkdocs itself checks links, anchors and the navigation.
"""

from __future__ import annotations

import ast
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
PACKAGES = {
    "recorder_core": "recorder-core",
    "recorder_core.client": "recorder-core",
    "recorder_core.collate": "recorder-core",
    "recorder_core.export": "recorder-core",
    "recorder_core.rollout": "recorder-core",
    "recorder_core.server": "recorder-core",
    "sglang_recorder": "sglang-recorder",
    "tinker_recorder": "tinker-recorder",
    "vllm_recorder": "vllm-recorder",
}
ELSEWHERE = re.compile(r"^(?:https?:)?//")


class Page(HTMLParser):
    """What a page loads, the ids that it has, and what of it is not as it was meant."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.mermaid = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        self.mermaid |= "mermaid" in given.get("class", "").split()
        if tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given.get("href", ""))
        if tag != "a":
            self.loads += [given[name] for name in ("src", "srcset", "data") if name in given]


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    if not (SITE / "index.html").exists():
        pytest.fail("there is no site: `make docs` builds it, and then runs these tests")
    return {str(path.relative_to(SITE)): Page(path) for path in SITE.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(pages: dict[str, Page]) -> None:
    loads = [(name, each) for name, page in pages.items() for each in page.loads]
    assert len(loads) > len(pages), "a page without a script or style: this test sees nothing"
    assert [each for each in loads if ELSEWHERE.match(each[1])] == []


def test_no_style_asks_for_fonts_or_pictures_elsewhere() -> None:
    styles = [*SITE.rglob("*.css")]
    assert styles
    for style in styles:
        text = style.read_text()
        for target in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text):
            assert not ELSEWHERE.match("".join(target)), style


def test_no_page_has_what_the_theme_would_fetch_a_library_for(pages: dict[str, Page]) -> None:
    assert [name for name, page in pages.items() if page.mermaid] == []


def public(module: str) -> list[str]:
    """`__all__`, read and not imported: the manual is built where nothing of ours is installed."""
    folder = ROOT / "packages" / PACKAGES[module] / "src" / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [each.id for each in targets if isinstance(each, ast.Name)] == ["__all__"]:
            assert isinstance(node, ast.Assign)
            names: list[str] = ast.literal_eval(node.value)
            return names
    return [
        each.name
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and not each.name.startswith("_")
    ]


@pytest.mark.parametrize("module", PACKAGES)
def test_the_reference_has_every_public_name(pages: dict[str, Page], module: str) -> None:
    ids = {name for page in pages.values() for name in page.ids if "." in name}
    known = {each.rpartition(".")[2] for each in ids}
    assert [name for name in public(module) if name not in known] == []


def test_examples_in_docstrings_are_code() -> None:
    for path in (SITE / "api").rglob("*.html"):
        quoted = re.findall(r"<blockquote>.*?</blockquote>", path.read_text(), re.DOTALL)
        assert not [each for each in quoted if "record" in each], path
