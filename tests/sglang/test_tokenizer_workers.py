"""Two tokenizer workers in front of two schedulers, and the recorder process of both workers."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import sglang
from packaging.version import Version

from examples.sglang_server import SGLangServer
from recorder_core import FinishReason, Record
from recorder_core.client import RecordClient
from sglang_recorder import compat
from sglang_recorder.weights import IN_PLACE_UPDATE, STALE_CACHE
from tests.front_ends import FrontEnd, is_gone, recorder_process
from tests.models import tiny_qwen3
from tests.sglang.apis import (
    PROMPT_IDS,
    assert_recorded,
    chat,
    counters,
    only,
    settle,
    wait_until,
)
from tests.sglang.conftest import ADMIN_KEY, PACED

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(Version(sglang.__version__) < compat.WORKERS_SINCE, reason="refused before"),
]
FreshKey = Callable[[], str]

LONG = {"max_new_tokens": 300, "ignore_eos": True}
FEW = {"max_new_tokens": 4, "ignore_eos": True}


class Worker(FrontEnd):
    """One of the tokenizer workers."""

    def generate(self, key: str, ids: list[int] = PROMPT_IDS, **sampling: object) -> dict[str, Any]:
        """Ask for tokens, and for their logprobs."""
        body = {"input_ids": ids, "sampling_params": sampling or FEW, "return_logprob": True}
        output: dict[str, Any] = self.post("/generate", body, key)
        return output

    def control(self, path: str, **body: object) -> Any:
        """Use one of SGLang's own control routes."""
        return self.post(path, body, ADMIN_KEY)

    @contextmanager
    def generating(self, client: RecordClient, key: str) -> Iterator[None]:
        """Meanwhile it generates many tokens, some of which are there."""
        body = {"input_ids": PROMPT_IDS, "sampling_params": LONG}
        failed: list[BaseException] = []

        def generate() -> None:
            try:
                self.post("/generate", body, key)
            except BaseException as error:
                failed.append(error)
                raise

        thread = threading.Thread(target=generate)
        thread.start()
        wait_until(lambda: bool(failed) or counters(client).pending > 0)
        yield
        thread.join()
        assert not failed


def record_of(client: RecordClient, key: str) -> Record:
    """The one record of a key, once it is there and its connection is over."""
    wait_until(lambda: [each.delivered is not None for each in client.get(key)] == [True])
    return only(client.get(key))


def labels(record: Record) -> list[str]:
    return [span.version for span in record.versions]


@pytest.fixture(scope="module")
def server(log_folder: Path) -> Iterator[SGLangServer]:
    args = ["--enable-recording", "--admin-api-key", ADMIN_KEY, "--dtype", "float32"]
    args += ["--tokenizer-worker-num", "2", "--dp-size", "2"]
    # Else each scheduler looks for a NUMA node of its own.
    env = {**PACED, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    with SGLangServer(tiny_qwen3(), *args, env=env, log=log_folder / "workers.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: SGLangServer) -> Iterator[RecordClient]:
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def workers(server: SGLangServer) -> Iterator[list[Worker]]:
    wait_until(lambda: server.log().count("Application startup complete") == 2, 120)
    pids = sorted(map(int, re.findall(r"multi-tokenizer worker process (\d+)", server.log())))
    found = [Worker(server, psutil.Process(pid), ADMIN_KEY, "/v1/models") for pid in pids]
    assert len(found) == 2
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("number", [0, 1])
def test_each_records_what_it_generates(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey, number: int
) -> None:
    shown, silent, streamed = fresh_key(), fresh_key(), fresh_key()
    output = workers[number].generate(shown, max_new_tokens=12, temperature=0.7)
    assert_recorded(record_of(client, shown), output)
    asked = chat(max_tokens=6, temperature=0)
    reply = workers[number].post("/v1/chat/completions", asked, silent)
    asked["logprobs"] = True
    events = workers[number].stream("/v1/chat/completions", asked, streamed)
    choices = [choice for each in events for choice in each["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    tokens = [each for shown in logprobs for each in shown["content"]]
    record, other = record_of(client, streamed), record_of(client, silent)
    assert [each["logprob"] for each in tokens] == pytest.approx(record.logprobs.tolist(), abs=0)
    assert record.response_text == "".join(each["delta"].get("content") or "" for each in choices)
    # The same tokens, from another engine core perhaps; nobody had asked for their logprobs.
    assert reply["choices"][0]["logprobs"] is None
    assert other.response_ids.tolist() == record.response_ids.tolist()
    np.testing.assert_allclose(other.logprobs, record.logprobs, atol=1e-4)
    assert (record.model, record.delivered, other.delivered) == ("model", True, True)


def test_a_run_that_both_served_is_one_trajectory(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    key, path = fresh_key(), [5, 300, 7]
    for number in range(4):
        path += [*workers[number % 2].generate(key, path)["output_ids"], 11]
    [experience] = client.experiences(key)
    assert experience.tokens.tolist() == path[:-1]
    assert (len(experience.turns), experience.action_mask.sum()) == (4, 16)


def test_either_answers_for_both(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    keys = [fresh_key() for _ in workers]
    batch = keys[0].split("/")[0]
    for worker, key in zip(workers, keys, strict=True):
        worker.generate(key)
        client.update_reward(key, 0.5)
    for worker in workers:
        listed = worker.records(f"keys?prefix={batch}").json()
        assert sorted((each["key"], each["reward"]) for each in listed) == [
            (key, 0.5) for key in keys
        ]
        assert worker.records("stats").json()["store"]["records"] >= len(keys)
        assert "recorder_started_total" in worker.records("metrics").text
        assert worker.records("view").status_code == 200
    late = fresh_key()
    with (
        workers[1].generating(client, late),
        client.drain(batch, wait_s=60) as drained,
    ):
        pass
    taken = {str(each.key): only(list(each.records.values())) for each in drained.runs}
    lengths = {key: len(record.response_ids) for key, record in taken.items()}
    assert lengths == {**dict.fromkeys(keys, 4), late: 300}


def test_a_client_that_leaves_is_recorded_as_cut(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    keys = [fresh_key() for _ in workers]
    body = {"input_ids": PROMPT_IDS, "sampling_params": {**LONG, "max_new_tokens": 1500}}
    for worker, key in zip(workers, keys, strict=True):
        worker.stream("/generate", body, key, pieces=5)
    settle(client)
    for key in keys:
        record = record_of(client, key)
        assert record.delivered is False
        assert record.finish_reason is FinishReason.ABORT or "client_disconnected" in record.flags
        assert len(record.logprobs) == len(record.response_ids) >= 5


def test_a_label_holds_in_both(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    for label in ("41", "42"):
        client.set_version(label)
        for worker in workers:
            key = fresh_key()
            worker.generate(key)
            assert labels(record_of(client, key)) == [label]


def test_weights_replaced_by_way_of_one_are_replaced_for_both(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    def labels_now() -> list[list[str]]:
        keys = [fresh_key() for _ in workers]
        for worker, key in zip(workers, keys, strict=True):
            worker.generate(key)
        return [labels(record_of(client, key)) for key in keys]

    path = str(tiny_qwen3())
    client.set_version("43")
    assert workers[0].control("/update_weights_from_disk", model_path=path)["success"]
    assert labels_now() == [["43+1"]] * 2
    update = {"model_path": path, "weight_version": "44"}
    assert workers[1].control("/update_weights_from_disk", **update)["success"]
    assert labels_now() == [["44"]] * 2


def test_an_update_in_place_by_way_of_one_marks_what_the_other_generates(
    client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    first, other = workers
    meanwhile, prompt = fresh_key(), [9, *PROMPT_IDS, *PROMPT_IDS]

    def found() -> list[Record]:
        # More than there are schedulers: one of them has seen the prompt before.
        keys = [fresh_key() for _ in range(3)]
        for key in keys:
            other.generate(key, prompt)
        return [record for key in keys if (record := record_of(client, key)).cached_tokens]

    found()
    with other.generating(client, meanwhile):
        first.control("/pause_generation", mode="in_place")
        body = {"model_path": str(tiny_qwen3()), "flush_cache": False}
        assert first.control("/update_weights_from_disk", **body)["success"]
        first.control("/continue_generation")
    assert IN_PLACE_UPDATE in record_of(client, meanwhile).flags
    stale = found()
    assert stale
    assert all(STALE_CACHE in record.flags for record in stale)
    assert first.connected().post("/flush_cache").status_code == 200
    fresh = found()
    assert fresh
    assert not any(STALE_CACHE in record.flags for record in fresh)


def test_generations_go_on_while_the_recorder_process_is_gone(
    server: SGLangServer, client: RecordClient, workers: list[Worker], fresh_key: FreshKey
) -> None:
    process = recorder_process(server)
    assert process is not None
    before = counters(client)
    keys = [fresh_key() for _ in range(6)]
    process.suspend()  # what is sent now is not confirmed
    for number, key in enumerate(keys):
        workers[number % 2].generate(key)
        if number == 1:
            process.kill()
    wait_until(lambda: workers[0].records("stats").status_code == 200, 60)
    wait_until(lambda: counters(client).started >= len(keys), 60)
    stats = counters(client)
    assert stats.instance != before.instance
    assert stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending
    assert set(stats.dropped) == {"store_down"}
    assert stats.dropped["store_down"] >= 2
    missing = [each.missing for each in client.keys(keys[0].split("/")[0]) if each.missing]
    assert missing == [{"store_down": 1}] * stats.dropped["store_down"]
    late = fresh_key()
    workers[1].generate(late)
    assert len(client.get(late)) == 1


def test_nothing_is_left_behind(server: SGLangServer) -> None:
    process = recorder_process(server)
    assert process is not None
    folder = Path(process.cmdline()[-1])
    assert folder.exists()
    started = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGTERM)
    server.wait(60)
    wait_until(lambda: all(map(is_gone, started)))
    assert not folder.exists()
    assert "records were not drained" in server.log()
