"""`export` and `view`: what is given to other programs."""

from __future__ import annotations

import base64
import json
import re
import sys
from types import ModuleType

import numpy as np
import pytest
from fastapi import FastAPI

from recorder_core import KeyPrefix, assemble, decode_runs, encode_runs
from recorder_core.codec import StreamDecoder, as_json
from recorder_core.server import AdminGuard, records_router
from tests.core.cli.given import fill, key
from tests.core.client.servers import ADMIN_KEY, serving


def said(ended, code, text):
    assert (ended.code, ended.out, ended.err) == (code, "", f"recorder: {text}\n")


def test_trajectories_as_lines_of_json(recorder, server, tmp_path):
    fill(server)
    said(recorder("export", "0", "-o", "b.jsonl"), 0, "b.jsonl: 6 rows")
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    wanted = json.loads(as_json(assemble(server.store.get(key("0/task-7/3")))))
    assert [json.loads(line) for line in lines[3:5]] == wanted
    assert recorder("export", "0").out.splitlines() == lines
    assert server.store.stats().records == 7


def test_the_records_themselves(recorder, server, tmp_path):
    fill(server)
    said(recorder("export", "0/task-7", "-o", "b.rec"), 0, "b.rec: 4 runs")
    runs = decode_runs((tmp_path / "b.rec").read_bytes())
    assert [run.key.text for run in runs] == [f"0/task-7/{run}" for run in range(4)]
    assert runs[3] == server.store.get(key("0/task-7/3"))[0]
    said(recorder("export", "b.rec", "-o", "c.jsonl"), 0, "c.jsonl: 5 rows")


def test_parquet_without_loss(recorder, server, tmp_path):
    parquet = pytest.importorskip("recorder_core.export.parquet", exc_type=ImportError)
    fill(server)
    said(recorder("export", "0", "-o", "b.parquet"), 0, "b.parquet: 6 rows")
    found = list(parquet.read(tmp_path / "b.parquet"))
    assert found[3:5] == assemble(server.store.get(key("0/task-7/3")))
    assert len(found) == 6


def test_the_page_in_one_file(recorder, server, tmp_path):
    """What a browser makes of it is in `tests/view/test_saved.py`."""
    hostile = "</script><!--<script>"
    server.submit(key("0/t/0"), [1, 2], [3], response_text=hostile)
    server.submit(key("0/t/1"), [1, 2], [4, 5])
    server.recorder.flush()
    said(recorder("export", "0", "-o", "b.html"), 0, "b.html: 2 runs")
    page = (tmp_path / "b.html").read_text()
    assert hostile not in page
    assert page.count("<script") == page.count("</script>") == 4  # two runs, the index, the page's
    blocks = re.findall(r'<script type="application/json" [^>]*>(.*)</script>', page)
    first, _, index = map(json.loads, blocks)
    (shown,) = first["forest"]["records"]
    assert shown["response_text"] == hostile
    (arrays,) = first["tokens"].values()
    assert np.frombuffer(base64.b64decode(arrays), "<i4", 3).tolist() == [1, 2, 3]
    assert [each["key"] for each in index["keys"]] == ["0/t/0", "0/t/1"]
    assert index["pieces"] is None
    assert "this server has no tokenizer" in index["reason"]


def test_the_bytes_of_tokens_in_a_file(recorder, server, tmp_path):
    fill(server)
    asked = ("export", "0", "-o", "b.rec", "--pieces")
    ended = recorder(*asked)
    assert ended.code == 1
    assert "this server has no tokenizer" in ended.err
    assert not (tmp_path / "b.rec").exists()

    app = FastAPI()
    app.include_router(
        records_router(
            server.recorder,
            guard=AdminGuard(ADMIN_KEY),
            set_version=None,
            pieces=lambda ids: [b"<%d>" % each for each in ids],
        )
    )
    with serving(app) as url:
        said(recorder(*asked, "--url", url), 0, "b.rec: 5 runs")
    decoder = StreamDecoder()
    decoder.feed((tmp_path / "b.rec").read_bytes())
    assert decoder.close() == server.store.get(KeyPrefix("0"))
    assert decoder.pieces == {each: b"<%d>" % each for each in range(1, 9)}


def test_an_export_replaces_nothing_unasked(recorder, server, tmp_path):
    fill(server)
    (tmp_path / "b.jsonl").write_text("dear")
    said(recorder("export", "0", "-o", "b.jsonl"), 2, "b.jsonl exists; --force replaces it")
    assert recorder("export", "0", "-o", "b.jsonl", "--force").code == 0
    assert (tmp_path / "b.jsonl").read_text().startswith("{")


def test_an_export_of_nothing_makes_no_file(recorder, server, tmp_path):
    assert recorder("export", "0", "-o", "b.jsonl").code == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("form", "name"), [("prime_rl", "math"), ("miles", None)])
def test_a_trainers_samples(recorder, server, form, name):
    fill(server)
    argv = ["export", "0/task-7", "--format", form, *(["--name", name] if name else [])]
    ended = recorder(*argv)
    assert ended.code == 0, ended.err
    samples = [json.loads(line) for line in ended.out.splitlines()]
    assert len(samples) == 5
    if form == "prime_rl":
        assert samples[0]["env_name"] == "math"
        assert samples[0]["token_ids"] == [1, 2, 3, 4]
        assert samples[0]["advantages"][2] > 0
    else:
        assert [sample["rollout_id"] for sample in samples] == [0, 1, 2, 3, 3]
        assert samples[0]["loss_mask"] == [1, 1]


def test_what_a_trainer_cannot_take_is_refused_and_rules_decide(recorder, server):
    fill(server)
    ended = recorder("export", "0", "--format", "miles")
    assert (ended.code, ended.out) == (1, "")
    assert "0/task-8/0" in ended.err
    ended = recorder("export", "0", "--format", "miles", "--rule", "missing_reward=drop")
    assert len(ended.out.splitlines()) == 5
    assert ended.err == (
        "recorder: 6 rows given, 5 written; left out, by rule: missing_reward=1; masked tokens: "
        "none\n"
    )
    assert recorder("export", "0", "--format", "slime").code == 1
    ended = recorder("export", "0", "--format", "miles", "--rule", "mood=good")
    assert ended.code == 2
    assert "of the rules mood one is none of missing_logprobs" in ended.err
    ended = recorder("export", "0", "--format", "miles", "--rule", "aborted=perhaps")
    assert ended.code == 1
    assert "aborted is 'perhaps', it must be one of" in ended.err


def test_atif(recorder, server):
    pytest.importorskip("atif")
    fill(server)
    ended = recorder("export", "0/task-7/3", "--format", "atif", "--name", "solver@1.0")
    first, second = map(json.loads, ended.out.splitlines())
    assert first["agent"]["name"] == "solver"
    assert first["agent"]["version"] == "1.0"
    assert second["session_id"] == "0/task-7/3"


def test_atif_without_its_package(recorder, server, monkeypatch):
    fill(server)
    monkeypatch.setitem(sys.modules, "atif", None)
    ended = recorder("export", "0", "--format", "atif", "--name", "solver")
    assert ended.code == 1
    assert "atif" in ended.err
    assert ended.err.count("\n") == 1


@pytest.fixture
def page(monkeypatch):
    """Stands where the page's own server is, and takes what it is started with."""
    asked, module = [], ModuleType("recorder_core.view.serve")
    module.run = lambda sources, **settings: asked.append((sources, settings)) or 0
    monkeypatch.setitem(sys.modules, "recorder_core.view", ModuleType("recorder_core.view"))
    monkeypatch.setitem(sys.modules, "recorder_core.view.serve", module)
    return asked


def test_view_is_given_the_engines(recorder, page, monkeypatch):
    monkeypatch.setenv("RECORDER_URL", "http://gpu-0:8000,http://gpu-1:8000")
    monkeypatch.delenv("RECORDER_ADMIN_KEY")
    assert recorder("view").code == 0
    assert recorder("view", "http://a:1", "http://b:2", "--port", "0", "--open").code == 0
    settings = {"port": 7433, "open_browser": False, "admin_key": None, "tokenizer": None}
    assert page == [
        (["http://gpu-0:8000", "http://gpu-1:8000"], settings),
        (["http://a:1", "http://b:2"], {**settings, "port": 0, "open_browser": True}),
    ]


def test_view_is_given_files_and_the_key(recorder, page, tmp_path):
    (tmp_path / "x.rec").write_bytes(encode_runs([]))
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")
    assert recorder("view", "x.rec", "--admin-key-file", key_file, "--tokenizer", "t").code == 0
    ((sources, settings),) = page
    assert sources == ["x.rec"]
    assert (settings["admin_key"], settings["tokenizer"]) == ("secret", "t")
