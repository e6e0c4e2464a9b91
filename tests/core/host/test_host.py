"""Several front ends behave as one: a real recorder process, relays, and front ends that die."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import httpx
import numpy as np
import pytest

from recorder_core import RecordKey, RoutedExperts, Sampling, VersionSpan
from recorder_core.errors import RecorderError
from recorder_core.exchange import Exchange
from recorder_core.host.messages import Folder
from recorder_core.host.relay import Relay
from recorder_core.options import Secret
from tests.core.client.servers import ADMIN_KEY
from tests.core.host.conftest import Host, MakeHost
from tests.core.host.front_end import turn
from tests.signals import as_usual

KEY = "0/task/0"


def eventually(found, timeout=20.0):
    """What `found` gives, once it is true."""
    deadline = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return value


def adds_up(stats) -> bool:
    return stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending


# As one


def test_a_run_goes_on_in_another_front_end(host: Host):
    one, two = host.relays
    one.submit(turn(KEY, [1, 2], [3, 4]))
    host.client.flush()
    two.submit(turn(KEY, [1, 2, 3, 4, 5], [6, 7]))
    (experience,) = host.client.experiences(key=KEY)
    assert experience.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    stats = host.stats()
    assert (stats.extended, stats.roots, stats.started) == (1, 1, 2)


def test_what_has_finished_in_any_front_end_is_drained(host: Host):
    for number in range(200):
        for name, relay in enumerate(host.relays):
            relay.submit(turn(f"{number}/task/{name}", [1] * 500, [2] * 100))
        if number % 20 == 0:
            with host.client.drain(str(number)) as drained:
                assert len(drained.runs) == 2
                assert drained.pending == 0
    assert adds_up(host.stats())


def test_a_drain_waits_for_what_is_in_flight_elsewhere(host: Host):
    pending = host.relays[1].start(RecordKey.parse(KEY))
    assert [each.pending for each in host.client.keys(key=KEY)] == [1]
    threading.Timer(0.5, lambda: pending.finish(turn(KEY, [1], [2]))).start()
    with host.client.drain(key=KEY, wait_s=20) as drained:
        assert len(drained.runs) == 1
        assert drained.pending == 0


def test_every_field_of_a_turn_arrives(host: Host):
    exchange = Exchange()
    exchange.take(b'{"model": "served-name"}')
    experts = RoutedExperts(data=np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    host.relays[0].submit(
        turn(
            KEY,
            [1, 2],
            [3, 4],
            logprobs=lambda: [-0.25, -0.5],
            versions=[VersionSpan(0, 2, "7")],
            sampling=lambda: Sampling(temperature=0.5),
            flags=lambda: ("constrained",),
            routed_experts=lambda: experts,
            exchange=exchange,
            prompt_text="ask",
            response_text="🤖 \udcff",
            stop_reason="</s>",
            adapter="lora",
            request_id="request-1",
        )
    )
    (record,) = host.client.get(KEY)
    assert record.logprobs.tolist() == [-0.25, -0.5]
    assert record.versions == (VersionSpan(0, 2, "7"),)
    assert record.sampling == Sampling(temperature=0.5)
    assert record.flags == ("constrained",)
    assert record.routed_experts == experts
    assert (record.model, record.delivered, record.adapter) == ("served-name", None, "lora")
    exchange.delivered = True
    (record,) = host.client.get(KEY)
    assert record.delivered is True


class DecidedMeanwhile(Exchange):
    """Its reply is at its end just after the turn was written for the recorder process."""

    def __reduce__(self):
        self.delivered = True
        return Exchange, ()  # what was written knows it not


def test_a_reply_that_ends_while_its_turn_is_sent_counts_as_delivered(host: Host):
    host.relays[0].submit(turn(KEY, [1], [2], exchange=DecidedMeanwhile()))
    host.client.flush()
    (record,) = host.client.get(KEY)
    assert record.delivered is True


def test_a_retry_in_another_front_end_supersedes_an_answer_that_was_not_delivered(host: Host):
    cut = Exchange()
    one, two = host.relays
    one.submit(turn(KEY, [1, 2], [3], exchange=cut))
    cut.delivered = False
    host.client.flush()
    again = Exchange()
    two.submit(turn(KEY, [1, 2], [4], exchange=again, attempt=1))
    again.delivered = True
    assert [each.tokens.tolist() for each in host.client.experiences(key=KEY)] == [[1, 2, 4]]
    assert host.stats().superseded == 1


def test_rewards_leases_and_routes_are_those_of_one_process(host: Host):
    host.relays[0].submit(turn(KEY, [1], [2]))
    host.relays[1].submit(turn("0/task/1", [1], [2]))
    host.client.update_reward(KEY, 1.0, info={"why": "ß"})

    def give_back() -> None:
        with host.client.drain("0") as drained:
            assert [run.reward for run in drained.runs] == [1.0, None]
            assert host.client.keys("0") == []
            raise InterruptedError

    with pytest.raises(InterruptedError):
        give_back()
    assert len(host.client.keys("0")) == 2
    host.client.set_version("8")
    assert host.versions == ["8"]
    page = httpx.get(f"{host.url}/records/view")
    assert page.status_code == 200
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    pieces = httpx.post(f"{host.url}/records/pieces", json={"ids": [1, 2]}, headers=key)
    assert pieces.json() == {"pieces": ["eA==", "eA=="]}
    metrics = httpx.get(f"{host.url}/records/metrics", headers=key).text
    assert "recorder_started_total 2.0" in metrics


def test_the_admin_key_is_asked_for(host: Host):
    for path in ("/keys", "/metrics", "/stats", "", "/drain", "/anything"):
        assert httpx.get(f"{host.url}/records{path}").status_code == 401


def test_what_front_ends_count_adds_up(host: Host):
    one, two = host.relays
    one.count_unkeyed("missing")
    two.count_unkeyed("missing")
    two.count_unkeyed("skipped")
    two.describe("logprobs", "a column per step")
    for relay in host.relays:
        relay.count_error("a fault")
    relay.start(RecordKey.parse(KEY)).drop("beam_search")
    relay.submit(turn(KEY, [1], []))
    stats = host.stats()
    assert stats.unkeyed == {"missing": 2, "skipped": 1}
    assert stats.errors == 2
    assert stats.dropped == {"beam_search": 1, "empty": 1}
    assert stats.engine == {"logprobs": "a column per step"}
    assert adds_up(stats)


def test_a_turn_that_cannot_be_read_costs_itself(host: Host):
    def fault():
        raise ValueError("a fault of the hook's")

    host.relays[0].submit(turn(KEY, [1], [2], logprobs=fault))
    host.relays[0].submit(turn("0/task/1", [1], [2]))
    stats = host.stats()
    assert (stats.recorded, stats.dropped, stats.errors) == (1, {"error": 1}, 1)
    assert adds_up(stats)


def test_news_reach_all_others(host: Host):
    heard: list[tuple[int, str]] = []
    for number, relay in enumerate([*host.relays, host.relay()]):
        relay.listen(lambda news, number=number: heard.append((number, news)))
    host.relays[0].announce("weights changed").result(10)
    assert sorted(heard) == [(1, "weights changed"), (2, "weights changed")]


# Front ends that end


def test_a_front_end_that_dies_loses_only_what_was_in_flight(host: Host):
    front_end = host.front_end()
    front_end.do("submit", "0/task/0", "0/task/1")
    front_end.do("start", "0/task/1", "0/task/2")
    assert host.stats().pending == 2
    front_end.kill()
    stats = eventually(lambda: (found := host.stats()).pending == 0 and found)
    assert (stats.recorded, stats.dropped) == (2, {"lost": 2})
    assert adds_up(stats)
    missing = {each.key.text: each.missing for each in host.client.keys("")}
    assert missing == {"0/task/0": {}, "0/task/1": {"lost": 1}, "0/task/2": {"lost": 1}}


def test_a_front_end_that_does_not_answer_holds_nobody_up_for_long(host: Host):
    front_end = host.front_end()
    host.relays[0].submit(turn(KEY, [1], [2]))
    front_end.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    host.client.update_reward(KEY, 1.0)
    assert time.monotonic() - began < 15
    front_end.process.send_signal(signal.SIGCONT)
    front_end.do("submit", "0/task/1")
    assert len(host.client.keys("")) == 2


# The recorder process dies


def test_generations_go_on_while_the_recorder_process_is_gone(host: Host):
    one, two = host.relays
    flying = one.start(RecordKey.parse("0/task/flying"))
    two.submit(turn("0/task/before", [1], [2]))
    before = host.stats()
    host.kill()
    eventually(lambda: two._connection is None or None)
    for number in range(3):
        two.submit(turn(f"0/task/{number}", [1], [2]))
    stats = eventually(lambda: answering(host))
    assert stats.instance != before.instance
    assert stats.dropped.get("store_down", 0) in range(4)
    flying.finish(turn("0/task/flying", [1], [2]))
    two.submit(turn("0/task/after", [1], [2]))
    stats = host.stats()
    assert {run.key.run for run in host.client.runs("0")} >= {"after", "flying"}
    assert stats.started == 5
    assert adds_up(stats)
    lost = stats.dropped.get("store_down", 0)
    told = {each.key.run: each.missing for each in host.client.keys("0") if each.missing}
    assert len(told) == lost
    assert all(each == {"store_down": 1} for each in told.values())


def answering(host: Host):
    try:
        stats = host.stats()
    except RecorderError:
        return None
    return stats if stats.pending >= 1 else None


def test_with_a_durable_store_nothing_acknowledged_is_missing(make_host: MakeHost, tmp_path):
    host = make_host(store=tmp_path / "records.db")
    for number in range(50):
        host.relays[number % 2].submit(turn(f"0/task/{number}", [1, 2], [3, 4]))
        host.client.update_reward(f"0/task/{number}", float(number))
    host.kill()
    flying = host.relays[0].start(RecordKey.parse("1/task/0"))  # shows that it is linked again
    eventually(lambda: answering(host))
    flying.drop("failed")
    runs = host.client.runs("0")
    assert [run.reward for run in runs] == [float(number) for number in range(50)]
    assert all(len(run.records) == 1 for run in runs)


def test_while_it_is_gone_records_are_refused_with_the_reason(host: Host):
    os.kill(host.process.pid, signal.SIGSTOP)
    host.kill()
    reply = httpx.get(
        f"{host.url}/records/keys?prefix=", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    )
    assert reply.status_code in (200, 503)
    if reply.status_code == 503:
        assert "it is started again" in reply.json()["detail"]


# Nothing is left behind

LAUNCHER = """
import sys, time
from recorder_core.host.process import HostProcess
from recorder_core.host.relay import Relay
from recorder_core.options import RecordingOptions
from tests.core.host.front_end import turn

if __name__ == "__main__":
    host = HostProcess(RecordingOptions(enabled=True))
    relay = Relay(host.folder)
    relay.submit(turn("0/task/0", [1], [2]))
    relay.close()
    print(host.pid, host.folder.path, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["input", "kill", "interrupt"])
def test_the_recorder_process_ends_with_its_launcher(end: str):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_usual,
        start_new_session=True,
    )
    pid, folder = launcher.stdout.readline().split()
    if end == "input":
        launcher.stdin.close()
    elif end == "kill":
        launcher.kill()
    else:
        os.killpg(launcher.pid, signal.SIGINT)
    launcher.wait(30)
    eventually(lambda: _is_dead(pid))
    assert "1 records were not drained" in launcher.stderr.read()
    if end != "kill":
        assert not Path(folder).exists()


def _is_dead(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


# Who may connect


def test_who_does_not_know_the_key_sends_nothing(host: Host):
    with pytest.raises(AuthenticationError):
        Client(host.folder.turns, "AF_UNIX", b"another key")
    assert oct(host.folder.path.stat().st_mode)[-3:] == "700"
    host.relays[0].submit(turn(KEY, [1], [2]))
    assert len(host.client.keys("")) == 1


def test_a_front_end_without_a_recorder_process_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr("recorder_core.host.relay._START_TIMEOUT_S", 0.5)
    with pytest.raises(RecorderError, match="does not answer in"):
        Relay(Folder(tmp_path))


def test_a_store_that_cannot_be_opened_is_said_at_the_start(make_host: MakeHost, tmp_path, capfd):
    store = tmp_path / "records.db"
    store.write_text("no database")
    with pytest.raises(RecorderError, match="the recorder process ended with exit code 1"):
        make_host(store=store)
    assert f"--recording-store: error: {store}" in capfd.readouterr().err
    assert store.read_text() == "no database"


def test_a_folder_too_long_for_sockets_is_refused(tmp_path):
    with pytest.raises(ValueError, match="set TMPDIR to a shorter one"):
        Folder(tmp_path / ("x" * 100)).check()


def test_secrets_stay_with_the_front_ends(make_host: MakeHost, monkeypatch):
    monkeypatch.setenv("RECORDER_ADMIN_KEY", "from-the-environment")
    monkeypatch.setenv("RECORDER_SECRET", "y" * 32)
    host = make_host(admin_key=Secret("of-the-operator"), secret=Secret("x" * 32))
    assert b"of-the-operator" not in pickle.dumps(host.process._options)
    assert b"x" * 32 not in pickle.dumps(host.process._options)
    environment = Path("/proc", str(host.process.pid), "environ").read_bytes()
    assert b"from-the-environment" not in environment
    assert b"y" * 32 not in environment
