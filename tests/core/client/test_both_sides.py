"""The records of an engine in this process answer as those behind a server do."""

from __future__ import annotations

import time

import pytest

from recorder_core import FinishReason, KeyPrefix, Record, RecordKey, Turn
from recorder_core.client import RecordClient
from recorder_core.errors import InvalidKeyError, LeaseError, NothingRecordedError
from recorder_core.local import LocalRecords
from recorder_core.recent import DEFAULT_RECENT_BYTES, Recent
from recorder_core.recorder import Recorder
from recorder_core.stores import MemoryStore
from tests.core.client.servers import ADMIN_KEY, KEY, Awaited

RUNS = [RecordKey("0", "task", run) for run in range(5)]


class Side:
    """A recorder, and whoever reads it."""

    def __init__(self, recorder, records):
        self.recorder, self.records = recorder, records

    def submit(self, key, prompt, response, **fields):
        now = time.time()
        turn = Turn(key, prompt, response, FinishReason.STOP, created_at=now, finished_at=now)
        for name, value in fields.items():
            setattr(turn, name, value)
        self.recorder.submit(turn)


@pytest.fixture(params=["in this process", "blocking", "async"])
def side(request, monkeypatch):
    monkeypatch.setattr("recorder_core.local.MAX_RUNS", 2)
    if request.param == "in this process":
        with LocalRecords(Recorder(MemoryStore(recent=Recent(DEFAULT_RECENT_BYTES)))) as records:
            yield Side(records.recorder, records)
        return
    server = request.getfixturevalue("server")
    made = (Awaited if request.param == "async" else RecordClient)(server.url, admin_key=ADMIN_KEY)
    yield Side(server.recorder, made)
    made.close()


def test_a_drain_takes_everything_page_after_page(side):
    """S7."""
    for key in RUNS:
        side.submit(key, [1], [2])
    with side.records.drain("0") as drained:
        assert [run.key for run in drained.runs] == RUNS
        assert (len(drained.leases), drained.more, drained.pending) == (3, False, 0)
        assert side.records.keys() == []
    assert side.recorder.store.stats().leases == 0


def test_drained_runs_are_read_as_long_as_they_are_remembered(side):
    key = RUNS[0]
    side.submit(key, [1], [2])
    with side.records.drain(key):
        pass
    assert side.records.runs(key) == []
    (run,) = side.records.runs(key, drained=True)
    assert [each.response_ids.tolist() for each in run.records.values()] == [[2]]


def test_a_page_is_what_was_asked_for(side):
    for key in RUNS:
        side.submit(key, [1], [2])
    first = side.records.lease("0", max_bytes=10**9)
    assert (len(first.runs), first.more) == (2, True)
    again = side.records.lease("0", max_bytes=10**9, lease=first.leases[0].id)
    assert (again.runs, again.more) == (first.runs, True)
    assert side.records.ack(first) == 2
    with pytest.raises(LeaseError, match="acknowledged already"):
        side.records.lease("0", lease=first.leases[0].id)


def test_what_a_block_that_raises_had_is_back_at_once(side):
    """S7."""
    for key in RUNS:
        side.submit(key, [1], [2])
    with pytest.raises(RuntimeError), side.records.drain("0"):
        raise RuntimeError("the trainer died")
    assert [each.key for each in iter(side.records.keys())] == RUNS


def test_a_lease_that_is_not_open_is_extended_in_vain(side):
    side.submit(KEY, [1], [2])
    drained = side.records.lease("0")
    side.records.extend(drained, 60)
    assert side.records.release(drained) == 1
    with pytest.raises(LeaseError, match="unknown or has run out"):
        side.records.extend(drained)
    with pytest.raises(LeaseError):
        side.records.ack(drained)


def test_a_reward_is_the_runs_or_a_generations(side):
    """S3, W6."""
    side.submit(KEY, [1], [2], request_id="chatcmpl-a")
    assert side.records.update_reward(KEY, 0.5, info={"a": 1}) == 1
    assert side.records.update_reward(KEY, 1.0, sample_ids=["chatcmpl-a"]) == 1
    side.submit(KEY, [1, 2, 3], [4])
    with pytest.raises(NothingRecordedError, match=r"\['neither'\] stand for no generation"):
        side.records.update_reward(KEY, 1.0, sample_ids=["neither"])
    (run,) = side.records.runs(key=KEY)
    assert [each.reward for each in run.records.values()] == [1.0, None]
    assert (run.reward, run.info, run.rewarded) == (0.5, {"a": 1}, 2)
    assert len(side.records.experiences("0")) == 1


def test_a_run_that_lost_a_turn_says_so(side):
    """S1."""
    side.submit(KEY, [1], [2])
    side.recorder.start(KEY).drop("error")
    (listed,) = side.records.keys(key=KEY)
    assert listed.missing == {"error": 1}
    assert side.records.lease(key=KEY).incomplete == {KEY: {"error": 1}}


def test_what_is_put_deleted_and_blocked(side):
    put = Record.of(key=KEY, prompt_ids=[1], response_ids=[2], finish_reason="stop")
    assert side.records.overwrite(KEY, [put]) == 1
    assert side.records.get("") == [put]
    side.records.block(key=KEY)
    side.submit(KEY, [1], [2])
    assert side.records.flush() is True
    assert side.records.runs("0")[0].closed is True
    assert side.records.sweep(1e6) == 0
    assert side.records.delete("0") == 1
    assert side.recorder.stats().dropped == {"blocked": 1}


def test_what_is_forgotten_is_gone_and_comes_no_more(side, monkeypatch):
    """In calls of so many prefixes."""
    monkeypatch.setattr("recorder_core.local.MAX_PREFIXES", 2)
    side.submit(KEY, [1], [2])
    side.submit(KEY, [3], [4])
    other = RecordKey("0", "other", 0)
    side.submit(other, [1], [2])
    side.records.lease(key=other)
    side.records.flush()
    assert side.records.forget(["1", "2/absent", KeyPrefix("0/task"), "0/other"]) == 3
    for key in (KEY, other, RecordKey("1", "task", 0)):
        side.submit(key, [5], [6])
    assert side.records.flush() is True
    assert side.records.get("") == []
    assert side.recorder.stats().dropped == {"blocked": 3}
    assert side.records.forget([]) == 0


def test_prefixes_are_forgotten_all_or_none(side):
    side.submit(KEY, [1], [2])
    with pytest.raises(InvalidKeyError, match="a b"):
        side.records.forget(["0", "a b"])
    side.records.flush()
    assert len(side.records.get("0")) == 1


def test_neither_nor_both_of_prefix_and_key_is_refused(side):
    for call in (side.records.delete, side.records.block):
        with pytest.raises(ValueError, match="give a prefix, or key="):
            call()
    with pytest.raises(ValueError, match="give one"):
        side.records.runs("0", key=KEY)
