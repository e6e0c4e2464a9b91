"""`recorder_core.view.serve`: the page over several engines and files, in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recorder_core import KeyPrefix, encode_runs
from recorder_core.cli import run
from recorder_core.view import serve
from tests import signals
from tests.view.conftest import Tab
from tests.view.scenes import Engine
from tests.view.test_page import shown_text, wait_for_rows

_SCRIPT = """
import sys
from recorder_core.view import serve
sources, key, tokenizer = sys.argv[1].split(","), sys.argv[2] or None, sys.argv[3] or None
sys.exit(serve.run(sources, port=0, open_browser=False, admin_key=key, tokenizer=tokenizer))
"""


@contextmanager
def serving(*sources: str, admin_key: str = "", tokenizer: str = "") -> Iterator[str]:
    """The command in a process of its own; gives the address that it prints."""
    command = [sys.executable, "-c", _SCRIPT, ",".join(sources), admin_key, tokenizer]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ, preexec_fn=signals.as_usual
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        process.stdout.close()


def write(engine: Engine, path: Path) -> str:
    path.write_bytes(encode_runs(engine.recorder.store.get(KeyPrefix())))
    return str(path)


def test_several_engines_are_one_list_and_one_forest(tab: Tab):
    with Engine("s3cret") as one, Engine("s3cret") as two:
        path = one.generate("0/task/0", "ask", "answer")
        two.vocabulary, two.now = one.vocabulary, one.now
        two.generate("0/task/0", two.then(path, " and?"), "more")
        two.generate("0/task/1", "ask", "answer")
        with serving(one.url, two.url, admin_key="s3cret") as address:
            page = tab.page
            page.goto(address)
            page.uncheck("#group")
            page.select_option("#sort", "key")
            page.click("#order")
            wait_for_rows(page, ["0/task/0", "0/task/1"])
            page.click('.row-line[data-key="0/task/0"]')
            page.wait_for_selector(".segment.turn >> nth=1")
            assert shown_text(page) == "askanswer and?more"
            assert len(page.query_selector_all(".leaf")) == 1
            two.generate("0/task/2", "ask", "late")
            wait_for_rows(page, ["0/task/0", "0/task/1", "0/task/2"])
            two.reward("0/task/2", 0.75)
            page.wait_for_selector(".reward:text-is('0.75')")
            two.drain("0/task/2")
            page.wait_for_selector(".row-line.drained")


def test_the_engines_key_stays_with_the_server_and_the_token_works_once(tab: Tab):
    with Engine("s3cret") as engine:
        engine.generate("0/task/0", "ask", "answer")
        with serving(engine.url, admin_key="s3cret") as address:
            page = tab.page
            page.goto(address)
            wait_for_rows(page, ["0/task/0"])
            token = address.rpartition("=")[2]
            assert token not in page.url
            assert not any(token in url for url in tab.urls[1:])
            stored = page.evaluate("JSON.stringify(sessionStorage)")
            assert "s3cret" not in stored
            assert token not in stored
            base = address.partition("/view")[0]
            for body in ({"token": token}, {"token": ""}):
                request = urllib.request.Request(
                    f"{base}/session", json.dumps(body).encode(), method="POST"
                )
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(request)
            for path in ("keys", "recent", "stats", "forest?key=0/task/0"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(f"{base}/{path}")
            page.reload()
            wait_for_rows(page, ["0/task/0"])


def test_a_file_is_shown_with_its_rewards(tab: Tab, tmp_path: Path):
    with Engine() as engine:
        engine.generate("0/task/0", "ask", "<b>answer</b>")
        engine.reward("0/task/0", 0.5)
        name = write(engine, tmp_path / "batch-0.safetensors")
    with serving(name) as address:
        page = tab.page
        page.goto(address)
        wait_for_rows(page, ["0/task/0"])
        page.wait_for_selector(".reward:text-is('0.5')")
        page.keyboard.press("j")
        page.wait_for_selector("text=give a --tokenizer")
        page.select_option("#as-text", "text")
        assert page.text_content(".segment.turn pre.text") == "<b>answer</b>"


def test_a_file_that_holds_its_tokens_bytes_is_text(tab: Tab, tmp_path: Path):
    path = tmp_path / "b.rec"
    with Engine() as engine:
        engine.generate("0/task/0", "ask", " 🤖 é")
        assert run(["export", "--url", engine.url, "-o", str(path), "--pieces"]) == 0
    with serving(str(path)) as address:
        page = tab.page
        page.goto(address)
        wait_for_rows(page, ["0/task/0"])
        page.keyboard.press("j")
        page.wait_for_selector(".block .t")
        assert shown_text(page) == "ask 🤖 é"


def test_with_a_tokenizer_a_file_s_tokens_are_text(tab: Tab, tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        ["ask"], tokenizers.trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    with Engine() as engine:
        engine.generate("0/task/0", made.encode("ask").ids, made.encode(" 🤖 é").ids)
        name = write(engine, tmp_path / "batch-0.safetensors")
    with serving(name, tokenizer=str(tmp_path)) as address:
        page = tab.page
        page.goto(address)
        wait_for_rows(page, ["0/task/0"])
        page.keyboard.press("j")
        page.wait_for_selector(".block .t")
        assert shown_text(page) == "ask 🤖 é"


def test_an_engine_that_does_not_answer_is_named(tab: Tab):
    with Engine() as engine, Engine() as gone:
        engine.generate("0/task/0", "ask", "answer")
        with serving(engine.url, gone.url) as address:
            page = tab.page
            page.goto(address)
            wait_for_rows(page, ["0/task/0"])
            gone.__exit__()
            page.wait_for_selector("text=1 unreachable")
            wait_for_rows(page, ["0/task/0"])


@pytest.mark.parametrize(
    ("sources", "tokenizer", "code", "words"),
    [
        ([], None, 2, "give the URL of an engine"),
        (["gpu-0:8000"], None, 1, "gpu-0:8000 is neither a file nor a URL"),
        ([__file__], None, 1, "holds no runs"),
        (["http://127.0.0.1:1"], "missing", 1, "missing cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    sources: list[str],
    tokenizer: str | None,
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
):
    if tokenizer is not None:
        pytest.importorskip("tokenizers")
    found = serve.run(sources, port=0, open_browser=False, admin_key=None, tokenizer=tokenizer)
    assert found == code
    assert words in capsys.readouterr().err
