"""`drain`, `reward`, `version`, `rm` and `block`: what is changed, and what is told of it."""

from __future__ import annotations

import json
import os

import pytest

from recorder_core import decode_runs
from tests.core.cli.given import add, fill, key
from tests.core.client.servers import RecordingServer, serving


def told(ended, code, text):
    assert (ended.code, ended.out, ended.err) == (code, "", f"recorder: {text}\n")


def test_a_drain_is_in_the_file_and_acknowledged(recorder, server, tmp_path):
    fill(server)
    before = server.store.get(key("0/task-7/3"))

    told(recorder("drain", "0", "-o", "x.rec"), 0, "x.rec: 5 runs, 7 records, acknowledged")

    runs = decode_runs((tmp_path / "x.rec").read_bytes())
    assert len(runs) == 5
    assert runs[3] == before[0]
    assert [each.name for each in tmp_path.iterdir()] == ["x.rec"]
    stats = server.store.stats()
    assert (stats.records, stats.leases, stats.counters["acknowledged"]) == (0, 0, 7)
    assert recorder("drain", "0", "-o", "y.rec").code == 3
    assert not (tmp_path / "y.rec").exists()


def test_a_drain_tells_a_program_what_it_took(recorder, server):
    fill(server)
    held = server.recorder.start(key("0/task-7/0"))
    server.recorder.start(key("0/task-8/0")).drop("error")
    ended = recorder("drain", "0", "-o", "x.rec", "--json")
    assert json.loads(ended.out) == {
        "file": "x.rec",
        "runs": 5,
        "records": 7,
        "pending": 1,
        "more": False,
        "flushed": True,
        "incomplete": {"0/task-8/0": {"error": 1}},
    }
    assert ended.err.splitlines()[1:] == [
        "recorder: still in flight there: 1 generation",
        "recorder: incomplete: 1 run (0/task-8/0)",
    ]
    held.drop("rejected")


def test_a_drain_of_nothing_that_waits_says_so(recorder, server, tmp_path):
    held = server.recorder.start(key("0/task/0"))
    told(recorder("drain", "0", "-o", "x.rec"), 3, "nothing has finished under 0; 1 in flight")
    assert list(tmp_path.iterdir()) == []
    held.drop("rejected")


def test_a_drain_takes_a_page_where_it_is_asked_to(recorder, server, tmp_path):
    add(server, 3)
    ended = recorder("drain", "0", "-o", "a.rec", "--max-bytes", "1")
    assert ended.err.splitlines() == [
        "recorder: a.rec: 1 run, 1 record, acknowledged",
        "recorder: there are more: drain again, into another file",
    ]
    told(recorder("drain", "0", "-o", "b.rec"), 0, "b.rec: 2 runs, 2 records, acknowledged")


def test_a_drain_takes_from_all_replicas(recorder, server, second_server, tmp_path):
    fill(server)
    add(second_server, 2)
    urls = f"{server.url},{second_server.url}"
    told(
        recorder("drain", "0", "-o", "x.rec", "--url", urls),
        0,
        "x.rec: 7 runs, 9 records, acknowledged",
    )
    assert server.store.stats().bytes == second_server.store.stats().bytes == 0


def test_force_replaces_a_file(recorder, server, tmp_path):
    fill(server)
    (tmp_path / "x.rec").write_text("old")
    assert recorder("drain", "0", "-o", "x.rec", "--force").code == 0
    assert len(decode_runs((tmp_path / "x.rec").read_bytes())) == 5


@pytest.fixture
def meddling():
    """A server that lets a test do something just before a request is answered."""
    server, actions = RecordingServer(), {}

    @server.app.middleware("http")
    async def meddle(request, call_next):
        actions.pop(request.url.path, lambda: None)()
        return await call_next(request)

    with serving(server.app) as server.url:
        yield server, actions
    server.recorder.close()


def test_a_file_that_came_meanwhile_is_not_written_over(recorder, meddling, tmp_path):
    """And what was drained is given back."""
    server, actions = meddling
    fill(server)
    actions["/records/drain"] = lambda: (tmp_path / "x.rec").write_text("another's")
    told(
        recorder("drain", "0", "-o", "x.rec", "--url", server.url),
        1,
        "x.rec is not written (x.rec is there now; --force replaces it); 7 records were given back",
    )
    assert (tmp_path / "x.rec").read_text() == "another's"
    assert (server.store.stats().records, server.store.stats().leases) == (7, 0)


def test_a_disk_that_fills_up_gives_the_records_back(recorder, meddling, tmp_path):
    server, actions = meddling
    fill(server)
    # Written to, this device is a disk without room.
    part = tmp_path / f".x.rec.{os.getpid()}.part"

    def fill_up():
        part.unlink()
        part.symlink_to("/dev/full")

    actions["/records/drain"] = fill_up
    told(
        recorder("drain", "0", "-o", "x.rec", "--url", server.url),
        1,
        "x.rec is not written (No space left on device); 7 records were given back",
    )
    assert list(tmp_path.iterdir()) == []
    assert (server.store.stats().records, server.store.stats().leases) == (7, 0)


def test_a_lease_that_ran_out_is_told(recorder, meddling, tmp_path):
    server, actions = meddling
    fill(server)

    def pass_time():
        server.clock.now += 1_000

    actions["/records/ack"] = pass_time
    ended = recorder("drain", "0", "-o", "x.rec", "--url", server.url)
    assert ended.code == 1
    assert ended.err.startswith(
        "recorder: x.rec is written, but not all of its 7 records are acknowledged: they come "
        "back as well ("
    )
    assert len(decode_runs((tmp_path / "x.rec").read_bytes())) == 5
    assert server.store.stats().records == 7


def test_a_reward_is_the_runs(recorder, server):
    fill(server)
    told(
        recorder("reward", "0/task-7/3", "-1.5", "--info", "judge=exact", "--info", "score=[1, 2]"),
        0,
        "0/task-7/3: 3 generations, and those that end later",
    )
    (run,) = server.store.get(key("0/task-7/3"))
    assert (run.reward, run.info) == (-1.5, {"judge": "exact", "score": [1, 2]})


def test_a_reward_of_one_generation(recorder, server):
    fill(server)
    (run,) = server.store.get(key("0/task-7/3"))
    first, *_ = run.records
    told(recorder("reward", "0/task-7/3", "2", "--sample", first), 0, "0/task-7/3: 1 generation")
    (run,) = server.store.get(key("0/task-7/3"))
    assert [each.reward for each in run.records.values()] == [2.0, None, None]
    ended = recorder("reward", "0/task-7/3", "2", "--sample", "none")
    assert ended.code == 3
    assert "['none'] stand for no generation of 0/task-7/3" in ended.err


def test_a_reward_waits_for_a_run_in_flight_and_for_no_other(recorder, server):
    held = server.recorder.start(key("0/task/0"))
    told(
        recorder("reward", "0/task/0", "1"), 0, "0/task/0: 0 generations, and those that end later"
    )
    assert recorder("reward", "0/task/1", "1").code == 3
    held.drop("rejected")


def test_the_version_of_the_weights(recorder, server):
    told(recorder("version", "42"), 0, f"{server.url}: the weights are 42 from now on")
    assert server.version == "42"


def test_an_engine_without_a_version_says_so(recorder):
    server = RecordingServer(set_version=False)
    with serving(server.app) as url:
        ended = recorder("version", "42", "--url", url)
    assert ended.code == 1
    assert "this engine has no weight-version label to set" in ended.err


def test_rm_deletes_leased_runs_as_well(recorder, server):
    fill(server)
    server.store.drain(key("0/task-7/0"), "lease", 600)
    told(recorder("rm", "0", "--yes"), 0, "7 records deleted")
    assert recorder("rm", "0", "--yes").code == 3
    assert server.store.stats().bytes == 0


def test_rm_takes_a_prefix_and_no_file(recorder, server, tmp_path):
    fill(server)
    (tmp_path / "0").touch()
    told(recorder("rm", "0/task-8", "--yes"), 0, "1 record deleted")
    told(recorder("rm", "0", "--yes"), 0, "6 records deleted")


def test_block_refuses_what_comes(recorder, server):
    fill(server)
    told(recorder("block", "0", "--yes"), 0, "0 is blocked; 5 runs there, 0 generations in flight")
    server.submit(key("0/task-9/0"), [1], [2])
    server.recorder.flush()
    assert server.store.stats().records == 7
    assert [row[-1] for row in recorder("ls").rows[1:]] == ["yes"] * 5
