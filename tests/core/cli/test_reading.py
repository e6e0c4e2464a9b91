"""`ls`, `stats` and `show`: in a pipe, as JSON, over engines and over files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recorder_core import Run, assemble, decode_runs, encode_runs
from recorder_core.rollout.spool import Spool, Spooled
from recorder_core.rollout.task import Task
from recorder_core.runs import merged_by_key
from tests.core.builders import Recording, record
from tests.core.cli.given import add, fill, key

HEADER = ["key", "records", "pending", "rewarded", "reward", "missing", "bytes", "age_s", "closed"]
OLD = Path(__file__).parents[1] / "data" / "records-v1.safetensors"


def objects(ended):
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def saved(path, *runs):
    path.write_bytes(encode_runs(runs))
    return path


def test_ls_gives_whole_lines_to_programs(recorder, server):
    fill(server)
    ended = recorder("ls", "0")
    head, *rows = ended.rows
    assert head == HEADER
    assert [row[:6] for row in rows] == [
        ["0/task-7/0", "1", "0", "1", "1.0", ""],
        ["0/task-7/1", "1", "0", "1", "0.0", ""],
        ["0/task-7/2", "1", "0", "1", "0.5", ""],
        ["0/task-7/3", "3", "0", "3", "0.25", ""],
        ["0/task-8/0", "1", "0", "0", "", ""],
    ]
    assert all(len(row) == len(HEADER) for row in rows)
    assert ended.err == ""


def test_ls_sorts_and_what_has_no_reward_comes_last(recorder, server):
    fill(server)

    def runs(*argv):
        return [row[0].removeprefix("0/task-") for row in recorder("ls", *argv).rows[1:]]

    assert runs("0", "--sort", "reward") == ["7/1", "7/3", "7/2", "7/0", "8/0"]
    assert runs("0", "--sort", "reward", "--reverse", "--limit", "2") == ["7/0", "7/2"]
    assert runs("--sort", "records", "--reverse", "--limit", "1") == ["7/3"]
    assert runs("0/task-8") == ["8/0"]


def test_ls_as_json_is_what_the_server_says(recorder, server):
    fill(server)
    held = server.recorder.start(key("0/task-8/0"))
    (found,) = objects(recorder("ls", "0/task-8", "--json"))
    assert found["key"] == "0/task-8/0"
    assert (found["records"], found["pending"], found["reward"]) == (1, 1, None)
    held.drop("error")
    (found,) = objects(recorder("ls", "0/task-8", "--json"))
    assert found["missing"] == {"error": 1}
    assert recorder("ls", "0/task-8").rows[1][5] == "error=1"


def test_replicas_are_one(recorder, server, second_server):
    fill(server)
    second_server.submit(key("0/task-8/0"), [7], [8])
    second_server.submit(key("0/task-9/0"), [7], [8])
    urls = f"{server.url},{second_server.url}/v1"
    rows = recorder("ls", "--url", urls).rows[1:]
    assert [row[:2] for row in rows[-2:]] == [["0/task-8/0", "2"], ["0/task-9/0", "1"]]
    assert recorder("ls", server.url, second_server.url).rows[1:][-1][0] == "0/task-9/0"

    head, *counters = recorder("stats", "--url", urls).rows
    assert head == ["counter", server.url, second_server.url]
    assert ["recorder.recorded", "7", "2"] in counters
    assert "leaf" in recorder("show", "0/task-8/0", "--url", urls).out


def test_stats_as_json_is_an_object_for_each_engine(recorder, server):
    fill(server)
    (found,) = objects(recorder("stats", "--json"))
    assert found["of"] == server.url
    assert found["recorder"]["recorded"] == found["store"]["records"] == 7


def test_show_reports_on_a_run(recorder, server):
    fill(server)
    server.store.update(key("0/task-7/3"), info={"judge": "exact"})
    ended = recorder("show", "0/task-7/3")
    assert (ended.code, ended.err) == (0, "")
    head, info, _, *rest = ended.out.splitlines()
    assert head == ("0/task-7/3   reward 0.25   3 generations   2 trajectories   6 tokens trained")
    assert info == "info: judge=exact"
    assert rest[:3] == [
        "1  2 + 2 tokens   stop   weights 41   2 trained",
        "├─2  5 + 2 tokens   stop   weights 41→42   2 trained   ● leaf 1",
        "└─3  5 + 2 tokens   stop   weights 41→42   2 trained   ● leaf 2",
    ]
    text = "\n".join(rest[3:])
    assert "── prompt   2 tokens\nWhat?\n" in text
    assert "── between   1 token: no text is recorded\n" in text
    assert (
        "── turn 2   2 tokens sampled   mean logprob -0.50   weights 41→42   stop\nsecond 7" in text
    )


def test_show_the_leaf_that_is_asked_for(recorder, server):
    fill(server)
    assert "second 8" in recorder("show", "0/task-7/3", "--leaf", "2", "--text").out
    assert "second 8" not in recorder("show", "0/task-7/3", "--text").out
    ended = recorder("show", "0/task-7/3", "--leaf", "3")
    assert (ended.code, ended.err) == (
        3,
        "recorder: 0/task-7/3 has leaves 1 to 2, and no leaf 3\n",
    )


def test_a_long_text_is_cut_in_the_report_alone(recorder, server):
    server.submit(key("0/task/0"), [1], [2], response_text="x" * 3_000)
    server.recorder.flush()
    assert "\n… 2,000 further characters: --text\n" in recorder("show", "0/task/0").out
    assert "x" * 3_000 in recorder("show", "0/task/0", "--text").out


def test_the_forest_as_a_table(recorder, server):
    fill(server)
    head, *rows = recorder("show", "0/task-7/3", "--forest").rows
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["parent"] for row in rows] == ["", "1", "1"]
    assert [row["leaf"] for row in rows] == ["", "1", "2"]
    assert [row["trained_tokens"] for row in rows] == ["2", "2", "2"]
    assert [row["weights"] for row in rows] == ["41", "41→42", "41→42"]
    assert objects(recorder("show", "0/task-7/3", "--forest", "--json"))[1]["parent"] == 1


def test_tokens_are_those_of_the_trajectory(recorder, server):
    fill(server)
    rows = objects(recorder("show", "0/task-7/3", "--tokens", "--leaf", "2", "--json"))
    trajectory = assemble(server.store.get(key("0/task-7/3")))[1]
    assert [row["id"] for row in rows] == trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert [row["token"] for row in rows] == list(range(7))
    assert [row["part"] for row in rows] == [
        *["prompt"] * 2,
        *["sampled"] * 2,
        "between",
        *["sampled"] * 2,
    ]
    assert [row["turn"] for row in rows] == [None, None, 1, 1, None, 2, 2]
    assert [row["trained"] for row in rows[2:]] == trajectory.action_mask.tolist()
    assert [row["logprob"] for row in rows] == [None, None, -0.5, -0.5, None, -0.5, -0.5]
    assert [row["weights"] for row in rows] == [None, None, "41", "41", None, "41", "42"]


def test_tokens_around_one(recorder, server):
    fill(server)
    rows = recorder("show", "0/task-7/3", "--around", "4", "--context", "1").rows
    assert [row[0] for row in rows] == ["token", "3", "4", "5"]
    ended = recorder("show", "0/task-7/3", "--around", "7")
    assert (ended.code, ended.err) == (
        3,
        "recorder: the trajectory has the tokens 0 to 6, and no 7\n",
    )
    assert recorder("show", "0/task-7/3", "--around", "4", "--text").code == 2


def test_a_path_of_very_many_turns_is_shown():
    """Neither recursion nor a line that grows with the depth."""
    from recorder_core.cli.generations import Generations

    recording, path = Recording(), [1]
    for _ in range(1_010):
        recording.turn(path, [2])
        path = [*path, 2, 3]
    nodes = list(Generations(Run(recording.key, recording.records)).nodes())
    assert [node.number for node in nodes] == list(range(1, 1_011))
    assert {node.branches for node in nodes} == {""}
    assert [node.leaf for node in nodes[-2:]] == [None, 1]


def test_a_superseded_answer_is_named(recorder, server):
    server.submit(key("0/task/0"), [1], [2], finish_reason="abort", created_at=1.0, finished_at=2.0)
    server.submit(key("0/task/0"), [1], [3], created_at=3.0, finished_at=4.0)
    server.recorder.flush()
    lines = recorder("show", "0/task/0").out.splitlines()
    assert "superseded" in lines[2]
    assert "leaf 1" in lines[3]


def test_a_run_that_was_drained_is_shown_as_long_as_it_is_remembered(recorder, server):
    fill(server)
    there = [recorder("show", "0/task-7/3", view).out for view in ("--forest", "--tokens")]
    server.store.drain(key("0/task-7/3"), "lease", 600)
    server.store.ack("lease")
    gone = recorder("show", "0/task-7/3")
    assert gone.code == 3
    assert gone.err.endswith("Drained runs: --recent\n")

    asked = ("show", "0/task-7/3", "--recent")
    assert [recorder(*asked, view).out for view in ("--forest", "--tokens")] == there
    server.submit(key("0/task-7/3"), [1, 2, 3, 4, 5, 6, 7], [9], response_text="gone on")
    server.recorder.flush()
    assert json.loads(recorder("show", "0/task-7/3", "--json").out)["records"] == 1
    assert json.loads(recorder(*asked, "--json").out)["records"] == 4
    # It is shown, and not there again: no drain gives it once more.
    (again,) = server.store.drain(key("0/task-7/3"), "again", 600).runs
    assert len(again.records) == 1


def test_files_are_read_as_engines_are(recorder, server, tmp_path):
    fill(server)
    runs = server.store.get(key("0/task-7/3"))
    saved(tmp_path / "a.rec", *runs)
    saved(tmp_path / "b.rec", Run(key("1/t/0"), [record(key=key("1/t/0"), finished_at=9.0)]))
    assert [row[0] for row in recorder("ls", "a.rec", "b.rec").rows[1:]] == ["0/task-7/3", "1/t/0"]
    assert [row[0] for row in recorder("ls", "1", "a.rec", "b.rec").rows[1:]] == ["1/t/0"]
    for view in ([], ["--forest"], ["--text"], ["--tokens"]):
        live = recorder("show", "0/task-7/3", *view)
        assert recorder("show", "0/task-7/3", "a.rec", *view).out == live.out
    ended = recorder("show", "0/task-7/4", "a.rec")
    assert (ended.code, ended.err.split(".")[0]) == (
        3,
        "recorder: nothing under 0/task-7/4; nearest: 0/task-7/3",
    )
    counters = recorder("stats", "a.rec", "b.rec").rows
    assert counters[0] == ["counter", "a.rec, b.rec"]
    assert ["runs", "2"] in counters
    assert ["sampled_tokens", "7"] in counters
    assert ["finished.stop", "4"] in counters


def test_what_two_files_have_of_one_run_is_together(recorder, tmp_path):
    recording = Recording()
    first, second = recording.turn([1], [2]), recording.turn([1, 2, 3], [4])
    saved(tmp_path / "a.rec", Run(recording.key, [first]))
    saved(tmp_path / "b.rec", Run(recording.key, [first, second]))
    assert recorder("ls", "a.rec", "b.rec").rows[1][:2] == ["batch/task/0", "2"]


def test_the_file_of_a_spool(recorder, tmp_path):
    task = Task(task_id="t", batch_id="0", workflow="agents:Workflow")
    runs = [Run(key("0/t/0"), [record(key=key("0/t/0"))], reward=0.5)]
    Spool(tmp_path / "spool").put(task, Spooled(task=task, metrics={}, unfinished=0), runs)
    file = "spool/0/t/0.run"
    assert recorder("ls", file).rows[1][:5] == ["0/t/0", "1", "0", "1", "0.5"]


def test_a_blob_of_an_earlier_release(recorder, tmp_path):
    shutil.copy(OLD, tmp_path / "old.safetensors")
    found = {row[0]: row[1] for row in recorder("ls", "old.safetensors").rows[1:]}
    runs = decode_runs(OLD.read_bytes())
    assert found == {run.key.text: str(len(run.records)) for run in merged_by_key(runs)}


@pytest.mark.parametrize("word", ["0/", "0"])
def test_a_prefix_that_is_also_a_file(recorder, server, tmp_path, word):
    """A slash at its end says that it is a prefix."""
    fill(server)
    saved(tmp_path / "0", Run(key("5/t/0"), [record(key=key("5/t/0"))]))
    keys = [row[0] for row in recorder("ls", word).rows[1:]]
    assert ("5/t/0" in keys) == (word == "0")
    assert len(keys) == (1 if word == "0" else 5)


def test_a_prefix_that_is_also_a_folder(recorder, server, tmp_path):
    fill(server)
    (tmp_path / "0").mkdir()
    assert len(recorder("ls", "0").rows) == 6


def test_many_runs_are_read_task_by_task(recorder, server, tmp_path):
    """And a task whose key begins others is not read into them."""
    fill(server)
    add(server, 300, batch="0/task-7")
    assert recorder("export", "0/task-7", "-o", "x.rec").code == 0
    runs = decode_runs((tmp_path / "x.rec").read_bytes())
    assert [run.key for run in runs] == sorted(run.key for run in runs)
    assert len(runs) == 304
