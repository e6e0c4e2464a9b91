"""`recorder export -o FILE.html`: the page in one file, in a real browser, without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder_core import KeyPrefix, RecordKey, assemble, encode_runs
from recorder_core.cli import run
from recorder_core.view.saved import save
from tests.view.conftest import Tab
from tests.view.scenes import Engine, story
from tests.view.test_page import shown_text, wait_for, wait_for_rows

KEY = "0/task/0"
BREAKOUTS = [
    "</script><script>window.owned = true</script>",
    "<!-- <script> </script><img src=x onerror='window.owned = true'>",
    "]]></style></body></html>\u2028\u2029\x00\x1b[2J",
    "`${window.owned = true}` \\u003c/script\\u003e",
]


@pytest.fixture
def exported(engine: Engine, tmp_path: Path) -> Any:
    """Exports what the engine has, by the command; gives the file."""

    def export(*more: str) -> Path:
        path = tmp_path / "runs.html"
        argv = ["export", "--url", engine.url, "-o", str(path), "--force", *more]
        assert run(argv) == 0
        return path

    return export


def opened(tab: Tab, path: Path, place: str = "") -> Any:
    tab.page.goto(f"{path.as_uri()}{place}")
    return tab.page


def test_a_file_shows_what_the_engine_shows(tab: Tab, engine: Engine, exported: Any):
    story(engine, KEY)
    engine.generate("0/task/1", "ask", "answer 🤖")
    engine.reward("0/task/1", 0.25)
    runs = engine.recorder.store.get(RecordKey.parse(KEY))
    path = exported()
    engine.__exit__()  # nobody is there to be asked
    page = opened(tab, path)
    page.uncheck("#group")
    page.select_option("#sort", "key")
    page.click("#order")
    wait_for_rows(page, [KEY, "0/task/1"])
    page.wait_for_selector(".row-line[data-key='0/task/1'] .reward:text-is('0.25')")
    assert page.inner_text("#live") == "as saved"

    page.click(f".row-line[data-key='{KEY}']")
    for experience in assemble(runs):
        leaf = experience.eid.suffix
        page.click(f'.leaf[data-leaf="{leaf}"]')
        page.wait_for_selector(f'.leaf.picked[data-leaf="{leaf}"]')
        whole = b"".join(engine.vocabulary.pieces(experience.tokens.tolist())).decode()
        page.wait_for_function(
            """whole => [...document.querySelectorAll(".block")]
                .map(each => each.textContent).join("") === whole""",
            arg=whole,
        )
        trained = np.flatnonzero(experience.action_mask) + experience.prompt_length
        wait_for(page, ".block .m", "i", [str(at) for at in trained])
    assert {url.partition("#")[0] for url in tab.urls if not url.startswith("data:")} == {
        path.as_uri()
    }


@pytest.mark.parametrize("text", BREAKOUTS)
def test_no_text_leaves_its_block(tab: Tab, engine: Engine, exported: Any, text: str):
    engine.generate(KEY, text, text)
    engine.recorder.store.update(RecordKey.parse(KEY), info={text: text})
    page = opened(tab, exported(), f"#/{KEY}")
    page.wait_for_selector(".block .t")
    assert shown_text(page) == text + text
    assert page.evaluate("window.owned") is None
    assert page.evaluate("document.scripts.length") == 3  # a run, the index, and the page's own
    assert page.evaluate("document.images.length") == 0


def test_no_script_but_its_own_runs(browsing: Any, engine: Engine, exported: Any):
    """Should a text ever become more than data: the file itself forbids what it asks for."""
    engine.generate(KEY, "ask", "answer")
    path = exported()
    image = f"<img src='{engine.url}/planted' onerror='window.owned = true'>"
    planted = f"<script>window.owned = true</script>{image}"
    path.write_text(path.read_text().replace("<main>", f"<main>{planted}"))
    tab, finished = Tab(browsing), []
    tab.page.on("requestfinished", lambda request: finished.append(request.url))
    page = opened(tab, path)
    wait_for_rows(page, [KEY])
    assert page.evaluate("window.owned") is None
    violated = {each.partition(":")[0] for each in page.evaluate("window.violations")}
    assert {"script-src-elem", "script-src-attr", "img-src"} >= violated
    assert {"script-src-elem", "img-src"} <= violated
    assert not any("planted" in each for each in finished)
    page.close()


def test_a_file_of_runs_is_saved_with_the_engine_s_text(tab: Tab, engine: Engine, tmp_path: Path):
    engine.generate(KEY, "ask", "<b>answer</b>")
    recorded, path = tmp_path / "b.rec", tmp_path / "b.html"
    recorded.write_bytes(encode_runs(engine.recorder.store.get(KeyPrefix())))
    assert run(["export", str(recorded), "-o", str(path)]) == 0
    page = opened(tab, path, f"#/{KEY}")
    page.wait_for_selector("text=give a --tokenizer")
    page.select_option("#as-text", "text")
    assert page.text_content(".segment.turn pre.text") == "<b>answer</b>"


def test_a_file_that_holds_its_tokens_bytes_is_saved_with_them(
    tab: Tab, engine: Engine, tmp_path: Path
):
    engine.generate(KEY, "ask", "🤖")
    recorded, path = tmp_path / "b.rec", tmp_path / "b.html"
    assert run(["export", "--url", engine.url, "-o", str(recorded), "--pieces"]) == 0
    assert run(["export", str(recorded), "-o", str(path)]) == 0
    page = opened(tab, path, f"#/{KEY}")
    page.wait_for_selector(".block .t")
    assert shown_text(page) == "ask🤖"


def test_what_is_not_in_the_file_is_said(tab: Tab, engine: Engine, exported: Any):
    engine.generate(KEY, "ask", "answer")
    page = opened(tab, exported(), "#/0/task/9")
    page.wait_for_selector("text=0/task/9 is not in this file")


def test_the_script_is_one(engine: Engine):
    """No module is imported, and nothing in the page's own code ends its block."""
    written: list[bytes] = []

    class Sink:
        def write(self, data: bytes, /) -> None:
            written.append(data)

    engine.generate(KEY, "ask", "answer")
    assert save(engine.recorder.store.get(KeyPrefix()), Sink(), engine.vocabulary.pieces) == 1
    text = b"".join(written).decode()
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert script.rstrip().endswith("openRun(found.key, found.leaf, found.token);")
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    (index,) = re.findall(r'id="saved-index">(.*?)</script>', text, re.DOTALL)
    assert [each["key"] for each in json.loads(index)["keys"]] == [KEY]
