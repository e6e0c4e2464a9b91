"""The page in a real browser, over the real routes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder_core import RecordKey, assemble
from recorder_core.local import Now
from tests.view.conftest import Tab
from tests.view.scenes import STORY, Engine, long_run, story, tell

KEY = "0/task/0"
DOCS = Path(__file__).parents[2] / "docs"


def rows(page: Any) -> list[str]:
    return page.eval_on_selector_all(".row-line.run", "all => all.map(each => each.dataset.key)")


def wait_for(page: Any, selector: str, name: str, expected: list[str]) -> None:
    """Until the elements' data of this name are these."""
    page.wait_for_function(
        """([selector, name, expected]) => JSON.stringify([...document.querySelectorAll(selector)]
            .map(each => each.dataset[name])) === JSON.stringify(expected)""",
        arg=[selector, name, expected],
    )


def wait_for_rows(page: Any, expected: list[str]) -> None:
    wait_for(page, ".row-line.run", "key", expected)


def shown_text(page: Any) -> str:
    """The text of all tokens."""
    return page.eval_on_selector_all(".block", "all => all.map(each => each.textContent).join('')")


# Looking


def test_runs_are_listed_by_task_with_their_rewards(tab: Tab, engine: Engine):
    for run, reward in enumerate([1.0, 0.0, 0.25]):
        engine.generate(f"0/a/{run}", "ask", "answer")
        engine.reward(f"0/a/{run}", reward)
    engine.generate("0/b/0", "ask", "answer", finish_reason="length")
    page = tab.open(engine)
    wait_for_rows(page, ["0/b/0", "0/a/2", "0/a/1", "0/a/0"])
    assert [each.inner_text() for each in page.query_selector_all(".row-line .reward")] == [
        "○",
        "0.25",
        "0",
        "1",
    ]
    assert "μ 0.417" in page.inner_text(".row-line.task >> nth=1")
    page.select_option("#sort", "reward")
    page.uncheck("#group")
    wait_for_rows(page, ["0/a/0", "0/a/2", "0/a/1", "0/b/0"])
    page.click("#order")
    wait_for_rows(page, ["0/a/1", "0/a/2", "0/a/0", "0/b/0"])
    page.select_option("#finish", "length")
    wait_for_rows(page, ["0/b/0"])
    page.select_option("#finish", "")
    page.fill("#search", "a/2")
    wait_for_rows(page, ["0/a/2"])
    page.fill("#search", "")
    page.click("#histogram button >> nth=0")
    wait_for_rows(page, ["0/a/1"])


def test_groups_without_spread_are_found(tab: Tab, engine: Engine):
    for task, rewards in {"flat": [1.0, 1.0], "spread": [0.0, 1.0]}.items():
        for run, reward in enumerate(rewards):
            engine.generate(f"0/{task}/{run}", "ask", "answer")
            engine.reward(f"0/{task}/{run}", reward)
    page = tab.open(engine)
    page.click("text=groups without spread: 1 of 2")
    wait_for_rows(page, ["0/flat/1", "0/flat/0"])


def test_forest_mask_and_versions_are_those_that_a_trainer_gets(tab: Tab, engine: Engine):
    story(engine, KEY)
    runs = Now(engine.recorder).runs(RecordKey.parse(KEY))
    page = tab.open_run(engine, KEY)
    expected = {each.eid.suffix: each for each in assemble(runs)}
    leaves = page.eval_on_selector_all(".leaf", "all => all.map(each => each.dataset.leaf)")
    assert set(expected) < set(leaves)
    assert len(leaves) == len(assemble(runs, keep_superseded=True))
    words = {leaf: page.inner_text(f'.leaf[data-leaf="{leaf}"]') for leaf in leaves}
    (superseded,) = set(leaves) - set(expected)
    assert "superseded" in words[superseded]
    assert sum("prefix break" in each for each in words.values()) == 1
    for leaf, experience in expected.items():
        page.click(f'.leaf[data-leaf="{leaf}"]')
        page.wait_for_selector(f'.leaf.picked[data-leaf="{leaf}"]')
        tokens = engine.vocabulary.pieces(experience.tokens.tolist())
        whole = b"".join(tokens).decode()
        page.wait_for_function(
            """whole => [...document.querySelectorAll(".block")]
                .map(each => each.textContent).join("") === whole""",
            arg=whole,
        )
        trained = np.flatnonzero(experience.action_mask) + experience.prompt_length
        # A block is drawn token by token once it is seen, a moment after its text is there.
        wait_for(page, ".block .m", "i", [str(at) for at in trained])
        spans = [span.version for span in experience.model_versions]
        labels = [v for at, v in enumerate(spans) if at == 0 or spans[at - 1] != v]
        wait_for(page, ".v", "v", labels)


def test_the_worst_token_is_one_key_away(tab: Tab, engine: Engine):
    logprobs = [-0.1] * 5
    logprobs[3] = -9.5
    prompt = [104, 105]
    engine.generate(KEY, prompt, [97, 98, 99, 100, 101], logprobs=logprobs)
    page = tab.open_run(engine, KEY)
    page.keyboard.press("n")
    page.wait_for_selector('.t.sel[data-i="5"]')
    detail = page.inner_text(".detail")
    assert "token 5" in detail
    assert "9.50 (" in detail
    assert "✓ trained" in detail
    assert page.url.endswith("&t=5")
    page.reload()
    page.wait_for_selector('.t.sel[data-i="5"]')


def test_the_keyboard_is_enough(tab: Tab, engine: Engine):
    story(engine, "0/a/0")
    engine.generate("0/a/1", "ask", "answer")
    page = tab.open(engine)
    wait_for_rows(page, ["0/a/1", "0/a/0"])
    page.keyboard.press("j")
    page.wait_for_selector('.row-line.picked[data-key="0/a/1"]')
    page.keyboard.press("j")
    page.wait_for_selector('.row-line.picked[data-key="0/a/0"]')
    page.wait_for_selector(".leaf >> nth=3")
    leaves = page.eval_on_selector_all(".leaf", "all => all.map(each => each.dataset.leaf)")
    page.wait_for_selector(f'#run[data-shown="{leaves[0]}"]')
    page.keyboard.press("l")
    page.wait_for_selector(f'#run[data-shown="{leaves[1]}"]')
    page.keyboard.press("]")
    page.wait_for_selector(".t.sel")
    page.keyboard.press("m")
    assert not page.is_checked("#toggle-mask")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("1")
    wait_for_rows(page, ["0/a/1"])


# Text

HOSTILE = {
    "markup": "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>&lt;b&gt;",
    "terminal": "\x1b[2J\x1b]0;title\x07 red \x00 nul \x7f",
    "right to left": "before \u202egnp.exe\u202c after مرحبا שלום \u2066x",
    "split": "🤖👩‍👩‍👧‍👦é日本",
    "lines": "a\r\nb\n\n\tc\u2028d\ufeff",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_shown_as_it_is(tab: Tab, engine: Engine, text: str):
    engine.generate(KEY, text, text)
    page = tab.open_run(engine, KEY)
    assert shown_text(page) == text * 2
    page.select_option("#as-text", "text")
    page.wait_for_selector("pre.text")
    script = "all => all.map(each => each.textContent)"
    assert page.eval_on_selector_all("pre.text", script) == [text, text]
    assert page.evaluate("window.hit") is None
    assert page.query_selector("#run img, #run script") is None


def test_bytes_that_are_no_text_are_decoded_as_one_stream(tab: Tab, engine: Engine):
    stray = [0xF0, 0x9F, 0x41, 0x80, 0xED, 0xA0, 0x80, 0xC3]
    engine.generate(KEY, [0xE2, 0x82], [0xAC, *stray])
    page = tab.open_run(engine, KEY)
    assert shown_text(page) == bytes([0xE2, 0x82, 0xAC, *stray]).decode(errors="replace")


def test_a_split_character_keeps_a_box_for_each_token(tab: Tab, engine: Engine):
    engine.generate(KEY, "x", "🤖", logprobs=[-1.0, -3.0])
    page = tab.open_run(engine, KEY)
    assert page.get_attribute('.t[data-i="1"]', "data-tag") == "F0 9F"
    assert page.text_content('.t[data-i="2"]') == "🤖"
    page.click('.t[data-i="2"]')
    assert "3.00 (" in page.inner_text(".detail")


def test_an_override_does_not_turn_its_neighbours_round(tab: Tab, engine: Engine):
    engine.generate(KEY, [*b"abc"], [*engine.vocabulary.encode("\u202e"), *b"xyz"])
    page = tab.open_run(engine, KEY)
    lefts = [page.query_selector(f'.t[data-i="{at}"]').bounding_box()["x"] for at in range(4, 7)]
    assert lefts == sorted(lefts)
    assert page.get_attribute('.t[data-i="3"]', "data-tag") == "U+202E"


def test_without_a_tokenizer_ids_and_the_engine_s_text_are_shown(tab: Tab):
    with Engine(pieces=False) as engine:
        engine.generate(KEY, "ask", "<b>answer</b>")
        page = tab.open_run(engine, KEY)
        assert "no tokenizer to ask" in page.inner_text(".note")
        assert page.get_attribute(".t.m", "data-tag").startswith("[")
        page.select_option("#as-text", "text")
        assert page.text_content(".segment.turn pre.text") == "<b>answer</b>"


# Live


def test_what_happens_is_shown_as_it_happens(tab: Tab, engine: Engine):
    page = tab.open(engine)
    page.wait_for_selector("text=Nothing is recorded yet")
    path = engine.generate(KEY, "ask", "answer")
    wait_for_rows(page, [KEY])
    page.keyboard.press("j")
    page.wait_for_selector(".segment.turn")
    engine.generate(KEY, engine.then(path, " and?"), " more")
    page.wait_for_selector(".segment.turn >> nth=1")
    engine.reward(KEY, 0.5)
    page.wait_for_selector(".row-line .reward:text-is('0.5')")
    page.wait_for_selector(".headline:text-is('reward 0.5')")


def test_drained_runs_are_still_there(tab: Tab, engine: Engine):
    engine.generate(KEY, "ask", "answer")
    engine.reward(KEY, 1.0)
    page = tab.open(engine)
    wait_for_rows(page, [KEY])
    engine.drain()
    page.wait_for_selector(".row-line.drained")
    page.reload()
    page.wait_for_selector(".row-line.drained")
    page.keyboard.press("j")
    page.wait_for_selector(".block .t")
    assert shown_text(page) == "askanswer"
    assert "drained" in page.inner_text(".run-head")
    assert "reward 1" in page.inner_text(".run-head")


def test_a_run_that_is_gone_is_said_to_be(tab: Tab):
    with Engine(recent_bytes=0) as engine:
        engine.generate(KEY, "ask", "answer")
        engine.drain()
        page = tab.open(engine)
        wait_for_rows(page, [KEY])
        page.keyboard.press("j")
        page.wait_for_selector("text=drained longer ago than is remembered")


def test_a_restart_is_noticed_and_what_is_read_stays(tab: Tab):
    with Engine() as engine:
        engine.generate(KEY, "ask", "answer")
        page = tab.open_run(engine, KEY)
    page.wait_for_selector("#live.off:text('last reply')")
    with Engine(port=engine.port) as engine:
        page.wait_for_selector("text=started anew")
        engine.generate("1/task/0", "ask", "answer")
        wait_for_rows(page, ["1/task/0"])
        assert shown_text(page) == "askanswer"


# Who may look


def test_the_key_is_asked_for_and_kept_in_memory(tab: Tab):
    with Engine(admin_key="s3cret") as engine:
        engine.generate(KEY, "ask", "answer")
        page = tab.open(engine)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.click("#use-key")
        page.wait_for_selector("text=this key is another one")
        page.fill("#key", "s3cret")
        page.click("#use-key")
        wait_for_rows(page, [KEY])
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0
        assert page.evaluate("document.cookie") == ""
        assert not any("s3cret" in url for url in tab.urls)
        page.reload()
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "s3cret")
        page.check("#keep")
        page.click("#use-key")
        wait_for_rows(page, [KEY])
        page.reload()
        wait_for_rows(page, [KEY])
        assert page.evaluate("localStorage.length") == 0
        page.click("#forget")
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("sessionStorage.length") == 0


def test_a_page_of_another_origin_reads_and_deletes_nothing(browsing: Any, engine: Engine):
    engine.generate(KEY, "ask", "answer")
    with Engine() as other:
        page = browsing.new_page()
        page.goto(f"{other.url}/openapi.json")
        script = """async (url) => {
            const asked = [["GET", "keys?prefix="], ["DELETE", "?prefix="], ["GET", "view"]];
            return Promise.all(asked.map(([method, path]) =>
                fetch(`${url}/records/${path}`.replace("/?", "?"), { method })
                    .then((reply) => reply.text(), () => "refused")));
        }"""
        assert page.evaluate(script, engine.url) == ["refused"] * 3
        page.goto(engine.url.replace("127.0.0.1", "localhost") + "/records/view")
        wait_for_rows(page, [KEY])
        page.close()


# Many


def test_a_hundred_thousand_tokens_stay_few_elements(tab: Tab, engine: Engine):
    long_run(engine, KEY, 100_000)
    page = tab.open_run(engine, KEY)
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000
    text = shown_text(page)
    assert text.count("🤖") > 7_000
    page.keyboard.press("n")
    page.wait_for_selector(".t.sel")
    page.click(".map", position={"x": 700, "y": 5})
    page.wait_for_selector(".t.sel")
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000


def test_ten_thousand_runs_scroll_sort_and_filter(tab: Tab, engine: Engine):
    for number in range(10_000):
        key = f"0/t{number % 1250}/{number // 1250}"
        engine.submit(key, [1, 2], [3, 4])
        engine.reward(key, number % 7 / 6)
    engine.recorder.flush()
    page = tab.open(engine)
    page.wait_for_selector("text=10,000 of 10,000 runs", timeout=180_000)
    assert len(rows(page)) < 60
    took = page.evaluate(
        """async () => {
            const list = document.getElementById("runs");
            const frame = () => new Promise(requestAnimationFrame);
            const begun = performance.now();
            for (const part of [0.5, 1, 0.25]) {
                list.scrollTop = part * list.scrollHeight;
                await frame();
                await frame();
            }
            const sort = document.getElementById("sort");
            sort.value = "reward";
            sort.dispatchEvent(new Event("change"));
            return performance.now() - begun;
        }"""
    )
    assert took < 20_000  # on a busy machine; far less than drawing every row takes
    page.fill("#search", "t1249/")
    page.wait_for_selector("text=8 of 10,000 runs")


# How it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_it_fits_and_is_pictured(
    browsing: Any,
    engine: Engine,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    scheme: str,
    width: int,
    height: int,
):
    tell(engine)
    tab = Tab(browsing, width, height, scheme)
    page = tab.open_run(engine, STORY)
    page.wait_for_selector("#live.on")
    if width > 760:
        wait_for_some(page)
        page.keyboard.press("n")
        page.wait_for_selector(".t.sel")
        assert page.is_visible("#runs")
    else:
        assert not page.is_visible("#runs")
        assert page.is_visible(".back")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture = tmp_path / "page.png"
    page.screenshot(path=str(picture))
    assert re.match(rb"\x89PNG", picture.read_bytes())
    if request.config.getoption("--refresh-pictures", default=False) and width > 760:
        # The beginning shows most; the server's port is another one each time.
        page.eval_on_selector(".tokens", "each => { each.scrollTop = 0; }")
        (DOCS / "images").mkdir(exist_ok=True)
        page.evaluate("document.querySelector('#stats span').textContent = 'localhost:8000'")
        page.screenshot(path=str(DOCS / "images" / f"page-{scheme}.png"))
    tab.check()


def wait_for_some(page: Any) -> None:
    page.wait_for_selector(".row-line.run >> nth=10")
