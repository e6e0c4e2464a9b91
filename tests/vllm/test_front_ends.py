"""Two API servers, and the recorder process that both send their turns to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from recorder_core.recorder import RecorderStats
from tests.front_ends import FrontEnd, is_gone, recorder_process
from tests.models import tiny_qwen3
from tests.vllm.apis import only, settle, wait_until
from tests.vllm.conftest import ADMIN_KEY, ENV, PACED
from tests.vllm.soaking import check, soak
from vllm_recorder.weights import WEIGHTS_CHANGED

pytestmark = pytest.mark.server

Keys = Callable[[], str]
GREEDY = {"temperature": 0, "ignore_eos": True}


class APIServer(FrontEnd):
    """One of the API servers."""

    def complete(self, key: str, prompt: object, **fields: object) -> dict[str, Any]:
        body = {"model": "model", "prompt": prompt, "return_token_ids": True, **fields}
        choice: dict[str, Any] = self.post("/v1/completions", body, key)["choices"][0]
        return choice


def stats_of(client: RecordClient) -> RecorderStats:
    (reply,) = client.stats().values()
    return reply.recorder


@pytest.fixture(scope="module")
def server(log_folder: Path) -> Iterator[VLLMServer]:
    args = ["--enable-recording", "--dtype", "float32", *PACED, "--api-server-count", "2"]
    env = {**ENV, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": None}  # vLLM refuses it there
    log = log_folder / "front_ends.log"
    with VLLMServer(tiny_qwen3(), *args, env=env, log=log) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: VLLMServer) -> Iterator[RecordClient]:
    with RecordClient(server.base_url, admin_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def front_ends(server: VLLMServer) -> Iterator[list[APIServer]]:
    pids = {int(pid) for pid in re.findall(r"ApiServer_\d pid=(\d+)", server.log_path.read_text())}
    found = [APIServer(server, psutil.Process(pid), ADMIN_KEY) for pid in sorted(pids)]
    assert len(found) == 2
    yield found
    for each in found:
        each.close()


def test_a_run_that_both_served_is_one_trajectory(
    client: RecordClient, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    key, path = fresh_key(), [5, 300, 7]
    for number in range(4):
        sampled = front_ends[number % 2].complete(key, path, max_tokens=4, **GREEDY)
        path += [*sampled["token_ids"], 11]
    (experience,) = client.experiences(key)
    assert experience.tokens.tolist() == path[:-1]
    assert (len(experience.turns), experience.action_mask.sum()) == (4, 16)


@pytest.mark.parametrize("number", [0, 1])
def test_each_gets_its_own_logprobs(
    client: RecordClient, front_ends: list[APIServer], fresh_key: Keys, number: int
) -> None:
    silent, asking = fresh_key(), fresh_key()
    sampling = {"max_tokens": 24, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    front_ends[number].complete(silent, "Hello", **sampling)
    shown = front_ends[1 - number].complete(asking, "Hello", **sampling, logprobs=1)
    wait_until(lambda: only(client.get(silent)).delivered is not None)
    record = only(client.get(silent))
    assert record.response_ids.tolist() == shown["token_ids"]
    expected = np.array(shown["logprobs"]["token_logprobs"], np.float32)
    np.testing.assert_array_equal(record.logprobs, expected)
    assert (record.model, record.delivered) == ("model", True)


def test_either_answers_for_both(front_ends: list[APIServer], fresh_key: Keys) -> None:
    keys = [fresh_key() for _ in range(2)]
    for front_end, key in zip(front_ends, keys, strict=True):
        front_end.complete(key, "Hello", max_tokens=4)
    batch = keys[0].split("/")[0]
    for front_end in front_ends:
        listed = front_end.records(f"keys?prefix={batch}").json()
        assert sorted(each["key"] for each in listed) == sorted(keys)
        assert "recorder_started_total" in front_end.records("metrics").text
        assert front_end.records("view").status_code == 200


def test_a_client_that_leaves_is_recorded_as_cut(
    client: RecordClient, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    keys = [fresh_key() for _ in front_ends]
    for front_end, key in zip(front_ends, keys, strict=True):
        body = {"model": "model", "prompt": "Hello", "max_tokens": 1000, **GREEDY}
        front_end.stream("/v1/completions", body, key, pieces=5)
    settle(client)
    for key in keys:
        # The generation is over before its connection is.
        wait_until(lambda key=key: only(client.get(key)).delivered is not None)
        record = only(client.get(key))
        assert (record.finish_reason.value, record.delivered) == ("abort", False)
        assert len(record.logprobs) == len(record.response_ids) >= 5


def test_a_label_holds_in_both(
    client: RecordClient, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    for label in ("41", "42"):
        client.set_version(label)
        for front_end in front_ends:
            key = fresh_key()
            front_end.complete(key, "Hello", max_tokens=4)
            assert [span.version for span in only(client.get(key)).versions] == [label]


def test_weights_replaced_by_way_of_one_are_replaced_for_both(
    client: RecordClient, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    client.set_version("43")
    # No worker has it: what counts is that it may replace the weights.
    unknown = {"method": "load_weights_of_ours"}
    with contextlib.suppress(httpx.ReadError):  # it answers 500, or hangs up
        front_ends[0].connected().post("/collective_rpc", json=unknown)
    front_ends[0].close()
    keys = [fresh_key() for _ in front_ends]
    for front_end, key in zip(front_ends, keys, strict=True):
        front_end.complete(key, "Hello", max_tokens=4)
    for key in keys:
        record = only(client.get(key))
        assert (record.versions, record.flags) == ((), (WEIGHTS_CHANGED,))
    client.set_version("44")


async def test_what_many_clients_do_is_all_accounted_for(server: VLLMServer) -> None:
    account, stats = await soak(server.base_url, ADMIN_KEY, 20)
    assert check(account, stats) == []
    assert min(account.done[kind] for kind in ("whole", "stream", "several", "leave")) > 0
    assert len(account.answered) > 20


def test_generations_go_on_while_the_recorder_process_is_gone(
    server: VLLMServer, client: RecordClient, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    process = recorder_process(server)
    assert process is not None
    before = stats_of(client)
    process.send_signal(signal.SIGKILL)
    keys = [fresh_key() for _ in range(6)]
    for number, key in enumerate(keys):
        front_ends[number % 2].complete(key, "Hello", max_tokens=4)
    wait_until(lambda: front_ends[0].records("stats").status_code == 200, 60)
    wait_until(lambda: stats_of(client).started >= len(keys), 60)
    stats = stats_of(client)
    assert stats.instance != before.instance
    assert stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending
    assert set(stats.dropped) <= {"store_down"}
    missing = [each.missing for each in client.keys(keys[0].split("/")[0]) if each.missing]
    assert missing == [{"store_down": 1}] * stats.dropped.get("store_down", 0)
    late = fresh_key()
    front_ends[1].complete(late, "Hello", max_tokens=4)
    assert len(client.get(late)) == 1


def test_nothing_is_left_behind(
    server: VLLMServer, front_ends: list[APIServer], fresh_key: Keys
) -> None:
    front_ends[0].complete(fresh_key(), "Hello", max_tokens=4)
    process = recorder_process(server)
    assert process is not None
    folder = Path(process.cmdline()[-1])
    assert folder.exists()
    os.kill(server.pid, signal.SIGTERM)
    server.wait(60)
    wait_until(lambda: is_gone(process), 60)
    assert not folder.exists()
    assert "records were not drained" in server.log_path.read_text()
