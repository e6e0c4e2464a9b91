"""The clients against one server: what is written, read and drained."""

from __future__ import annotations

import asyncio
import pickle
import threading

import numpy as np
import pytest

from recorder_core import FinishReason, KeyPrefix, Record, RecordKey, Turn
from recorder_core.client import AsyncRecordClient
from recorder_core.errors import LeaseError
from tests.core.client.servers import ADMIN_KEY, KEY


def test_a_run_is_listed_read_and_assembled(client, server):
    server.submit(KEY, [1, 2], [3, 4])
    server.submit(KEY, [1, 2, 3, 4, 5], [6])

    (listed,) = client.keys()
    records = client.get("0")
    (experience,) = client.experiences("0/task")

    assert (listed.key, listed.records, listed.pending) == (KEY, 2, 0)
    assert [list(each.response_ids) for each in records] == [[3, 4], [6]]
    assert records[1].parent == records[0].id
    assert list(experience.tokens) == [1, 2, 3, 4, 5, 6]
    assert list(experience.action_mask) == [True, True, False, True]


def test_a_generation_in_flight_is_pending(client, server):
    generation = server.recorder.start(KEY)

    (listed,) = client.keys("0")
    with client.drain("0") as drained:
        pass

    assert (listed.records, listed.pending, drained.pending) == (0, 1, 1)
    generation.drop("rejected")
    with client.drain("0") as drained:
        assert drained.pending == 0


def test_a_turn_that_has_just_finished_is_drained_and_not_pending(client, server):
    for run in range(50):
        server.submit(RecordKey("0", "task", run), list(range(1000)), [1])
    with client.drain("0") as drained:
        assert (len(drained.records), drained.pending) == (50, 0)


def test_a_drain_waits_for_a_generation_in_flight(client, server):
    generation = server.recorder.start(KEY)
    turn = Turn(key=KEY, prompt_ids=[1], response_ids=[2], finish_reason=FinishReason.STOP)
    threading.Timer(0.3, generation.finish, [turn]).start()

    with client.drain("0", wait_s=10) as drained:
        assert (len(drained.records), drained.pending) == (1, 0)


def test_rewards_and_info_reach_the_experience(client, server):
    server.submit(KEY, [1], [2, 3])

    updated = client.update_reward(
        KEY, np.float32(0.5), info={"note": None}, token_level_reward=np.float32([1, 2])
    )

    assert updated == 1
    (experience,) = client.experiences(KEY)
    assert (experience.reward, experience.info) == (0.5, {"note": None})
    assert list(experience.token_level_reward) == [1, 2]


def test_a_reward_by_record_id_reaches_only_that_record(client, server):
    server.submit(KEY, [1], [2], id="first")
    server.submit(KEY, [1, 2, 3], [4], id="second")

    assert client.update_reward("0/task/0", 1.0, sample_ids=["first"]) == 1
    assert [each.reward for each in client.get("0")] == [1.0, None]


def test_a_reward_for_a_key_without_records_updates_nothing(client):
    assert client.update_reward("0/unknown/7", 1.0) == 0


@pytest.mark.parametrize("text", ["0/eval_short/1/0", "a%2Fb/c&d=e+f/g#h?i;j:k/3", "~/!/0"])
def test_a_key_travels_unchanged(client, server, text):
    key = RecordKey.parse(text)
    server.submit(key, [1], [2])
    server.submit(RecordKey.parse("other/task/0"), [1], [2])

    assert client.update_reward(text, 2.0) == 1
    assert [each.key for each in client.get(text)] == [key]
    assert [each.key for each in client.runs(key=text)] == [key]
    assert client.overwrite(text, client.get(key)) == 1
    assert client.delete(key) == 1
    assert [each.key.text for each in client.keys("")] == ["other/task/0"]


def test_a_prefix_matches_whole_components(client, server):
    for text in ("1/task/0", "10/task/0"):
        server.submit(RecordKey.parse(text), [1], [2])
    assert [str(each.key) for each in client.get(KeyPrefix("1"))] == ["1/task/0"]


def test_a_drain_is_acknowledged_when_its_block_ends_well(client, server):
    server.submit(KEY, [1], [2])

    with client.drain("0", lease_s=60) as drained:
        assert len(drained.experiences) == 1
        assert drained.experiences is drained.experiences
        assert client.get("0") == []
    server.clock.now += 61

    assert client.get("0") == []
    assert server.store.stats().counters["acknowledged"] == 1


def test_runs_come_back_at_once_with_their_rewards_when_the_block_raises(client, server):
    """S7."""
    server.submit(KEY, [1], [2])
    client.update_reward(KEY, 1.0)

    with (
        pytest.raises(RuntimeError, match="the trainer died"),
        client.drain("0", lease_s=60) as drained,
    ):
        raise RuntimeError("the trainer died")

    assert len(drained.records) == 1
    (run,) = client.runs("0")
    assert (len(run.records), run.reward) == (1, 1.0)
    assert server.store.stats().leases == 0


def test_a_lease_is_acknowledged_by_hand_once_or_twice(client, server):
    server.submit(KEY, [1], [2])

    drained = client.lease("0")

    assert client.ack(drained) == 1
    assert client.ack(drained) == 0


def test_a_lease_is_acknowledged_from_another_process(client, connect, server):
    server.submit(KEY, [1], [2])
    drained = pickle.loads(pickle.dumps(client.lease("0")))
    assert connect(server.url).ack(drained) == 1


def test_acknowledging_too_late_is_an_error(client, server):
    server.submit(KEY, [1], [2])

    with (
        pytest.raises(LeaseError, match=r"/records/ack: answered 404: lease .* has run out"),
        client.drain("0", lease_s=60),
    ):
        server.clock.now += 61

    assert len(client.get("0")) == 1


def test_a_superseded_retry_is_told_apart(client, server):
    server.submit(KEY, [1], [2], finish_reason=FinishReason.ABORT, id="aborted", created_at=1.0)
    server.submit(KEY, [1], [2, 3], id="kept", created_at=2.0, attempt=1)

    with client.drain("0") as drained:
        assert [each.turns[-1].record.id for each in drained.experiences] == ["kept"]
        assert [each.id for each in drained.superseded] == ["aborted"]


def test_the_remaining_routes(client, server):
    server.submit(KEY, [1], [2])

    assert client.flush() is True
    client.set_version("step-7")
    assert server.version == "step-7"
    client.set_version(np.int64(8))
    assert server.version == "8"
    client.block("0/task")
    server.submit(KEY, [1], [2])
    (stats,) = client.stats().values()
    assert stats.recorder.dropped == {"blocked": 1}
    assert list(client.stats()) == [server.url]
    server.clock.now += 10
    assert client.sweep(20) == 0
    assert client.sweep(5) == 1


def test_a_large_drain_arrives_whole(client, server):
    count, length = 40, 100_000
    tokens = np.arange(length, dtype=np.int32)
    for run in range(count):
        key = RecordKey("0", "task", run)
        record = Record.of(
            key=key,
            prompt_ids=tokens,
            response_ids=tokens + run,
            logprobs=np.full(length, -run, np.float32),
            finish_reason="stop",
        )
        server.store.add(record)

    with client.drain("0") as drained:
        assert sum(each.response_ids.nbytes for each in drained.records) == count * length * 4
        assert [each.eid.run for each in drained.experiences] == list(range(count))
        np.testing.assert_array_equal(drained.records[-1].response_ids, tokens + count - 1)


def test_the_async_client_drains_as_documented(server):
    async def main():
        async with AsyncRecordClient(server.url, admin_key=ADMIN_KEY) as client:
            async with client.drain("0") as drained:
                assert len(drained.records) == 1
            counts = [client.update_reward(KEY, 1.0) for _ in range(150)]
            assert sum(await asyncio.gather(*counts)) == 0

    server.submit(KEY, [1], [2])
    asyncio.run(main())
