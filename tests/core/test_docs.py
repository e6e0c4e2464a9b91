"""The examples of the manual and the README run, in their order, against real servers.

A page's blocks share one namespace. They find servers with recorded runs at the addresses that they
name, and what is in `given`. A block that needs more says so in a comment before it,
`<!-- needs: … -->`: it runs where what is named can be imported here and needs no engine, and is
compiled otherwise, with what it takes from recorder_core looked up.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recorder_core import RecordKey, VersionSpan
from recorder_core.client import RecordClient
from tests.core.client.servers import ADMIN_KEY, RecordingServer, serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
RUN_WHERE_INSTALLED = {"pyarrow", "torch"}
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^>]+) -->\n)?(?P<indent> *)```python\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced example."""

    page: Path
    line: int
    """Of its first line of code, from 1."""
    code: str
    needs: str

    def compile(self) -> Any:
        """The code, with the page's own line numbers in what it raises."""
        tree = ast.parse(self.code, str(self.page))
        ast.increment_lineno(tree, self.line - 1)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return compile(tree, str(self.page), "exec", flags=flags, dont_inherit=True)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        code = inspect.cleandoc("\n" + match["code"]) if match["indent"] else match["code"]
        found.append(Block(page, line, code, match["needs"] or ""))
    return found


def runs_here(block: Block) -> bool:
    if not block.needs:
        return True
    return block.needs in RUN_WHERE_INSTALLED and bool(importlib.util.find_spec(block.needs))


def has_examples(page: Path) -> bool:
    return any(map(runs_here, blocks(page)))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Two replicas that have recorded the runs of two batches, by the hosts of the examples."""
    monkeypatch.setenv("RECORDER_ADMIN_KEY", ADMIN_KEY)
    urls = []
    with ExitStack() as stack:
        for _ in range(2):
            server = RecordingServer()
            urls.append(stack.enter_context(serving(server.app)))
            stack.callback(server.recorder.close)
            for batch in ("0", "12"):
                for run in range(4):
                    key = RecordKey.parse(f"{batch}/task-7/{run}")
                    spans = [VersionSpan(0, 3, "41")]
                    server.submit(key, [1, 2], [3, 4, run], request_id=f"a{run}", versions=spans)
                    # Of the time that it takes a client to ask for its second turn.
                    server.recorder.flush()
                    later = [1, 2, 3, 4, run, 9]
                    server.submit(key, later, [5, 6, 7], request_id=f"b{run}", versions=spans)
                    server.recorder.flush()
                    server.store.update(key, reward=float(run % 2))
            server.recorder.flush()
        yield {"localhost": urls[0], "gpu-0": urls[0], "gpu-1": urls[1]}


@pytest.fixture
def given(servers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What a page may take for given: an open client, and what is the reader's own."""
    with RecordClient(servers["localhost"]) as records:
        yield {"__name__": "example", "records": records, "train": lambda experiences: None}


@pytest.mark.parametrize("page", [*filter(has_examples, PAGES)], ids=named)
def test_the_examples_of_a_page_run(
    page: Path,
    servers: dict[str, str],
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # for those that write files
    for block in filter(runs_here, blocks(page)):
        code = re.sub(r"http://([a-z0-9-]+):8000", lambda match: servers[match[1]], block.code)
        result = eval(block._replace(code=code).compile(), given)
        if inspect.iscoroutine(result):
            asyncio.run(result)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_example_compiles_and_takes_what_there_is(page: Path) -> None:
    for block in blocks(page):
        block.compile()
        for node in ast.walk(ast.parse(block.code)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.split(".")[0] != "recorder_core":
                continue
            if importlib.util.find_spec(node.module) is None:
                pytest.fail(f"{named(page)}:{block.line}: there is no {node.module}")
            try:
                module = importlib.import_module(node.module)
            except ImportError as error:
                if "recorder_core" in str(error.name):
                    raise
                continue  # an extra that is not installed here
            for each in node.names:
                there = hasattr(module, each.name) or importlib.util.find_spec(
                    f"{node.module}.{each.name}"
                )
                assert there, f"{named(page)}:{block.line}: {node.module} has no {each.name}"


def test_a_fence_in_another_language_or_a_misspelt_mark_is_not_passed_over() -> None:
    """Every mark stands before an example, and every fence that is Python is found."""
    for page in PAGES:
        text = page.read_text()
        assert text.count("```python\n") == len(blocks(page)), named(page)
        marks = len(re.findall(r"<!-- *needs", text))
        assert marks == sum(bool(block.needs) for block in blocks(page)), named(page)


def test_a_failing_example_is_told_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\na = 1\nraise ValueError(a)\n```\n")
    [block] = blocks(page)
    with pytest.raises(ValueError, match="1") as raised:
        eval(block.compile(), {})
    assert raised.traceback[-1].lineno == 5 - 1  # pytest counts from 0
    assert str(raised.traceback[-1].path) == str(page)
