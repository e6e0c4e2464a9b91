"""What workflows, schedulers and operators do with a running server's records."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from examples.vllm_server import VLLMServer
from recorder_core import FinishReason
from recorder_core.client import RecordClient
from recorder_core.errors import LeaseError, NotAuthorizedError, NothingRecordedError
from recorder_core.protocol import StatsReply
from tests.vllm.apis import PROMPT, Reply, Request, ask, completions, only, settle, wait_until
from tests.vllm.conftest import ADMIN_KEY
from tests.vllm.pacing import LONG_TOKENS

Keys = Callable[[], str]

SHORT = completions(PROMPT, max_tokens=5, temperature=0, ignore_eos=True)
LONG = completions(PROMPT, max_tokens=LONG_TOKENS, temperature=0, ignore_eos=True)


def batch_of(key: str) -> str:
    return key.split("/")[0]


def follow_up(reply: Reply) -> Request:
    """A request whose prompt continues an answer."""
    history = [*reply.prompt_ids, *reply.samples[0].ids, 20, 21]
    return completions(history, max_tokens=4, temperature=0, ignore_eos=True)


def stats_of(client: RecordClient) -> StatsReply:
    return client.stats()[client.urls[0]]


@pytest.fixture
def in_flight(
    recording_server: VLLMServer, record_client: RecordClient
) -> Iterator[Callable[[str], Future[Reply]]]:
    """Starts a long generation, and returns once the engine has it."""
    with ThreadPoolExecutor() as threads:

        def start(key: str) -> Future[Reply]:
            answer = threads.submit(ask, recording_server, key, LONG)
            wait_until(lambda: any(each.pending for each in record_client.keys(key)))
            return answer

        yield start


def test_a_drain_waits_for_what_is_in_flight(
    in_flight: Callable[[str], Future[Reply]], record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    answer = in_flight(key)
    with record_client.drain(batch_of(key), wait_s=60) as drained:
        assert drained.pending == 0
        record = only(drained.records)
    assert record.response_ids.tolist() == answer.result().samples[0].ids
    assert record.finish_reason is FinishReason.LENGTH
    assert record_client.get(key) == []


def test_a_drain_that_does_not_wait_says_how_much_is_in_flight(
    in_flight: Callable[[str], Future[Reply]],
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Keys,
) -> None:
    key, other = fresh_key(), fresh_key()
    ask(recording_server, key, SHORT)
    answers = [in_flight(key), in_flight(other)]
    with record_client.drain(batch_of(key)) as drained:
        assert drained.pending == 2
        assert [str(record.key) for record in drained.records] == [key]
    # What was pending comes with a later drain: nothing is lost, nothing comes twice.
    for answer in answers:
        answer.result()
    with record_client.drain(batch_of(key), wait_s=60) as drained:
        assert drained.pending == 0
        assert sorted(str(record.key) for record in drained.records) == sorted([key, other])
        assert [len(record.response_ids) for record in drained.records] == [
            LONG_TOKENS,
            LONG_TOKENS,
        ]


def test_a_drain_with_a_short_patience_ends_in_time(
    in_flight: Callable[[str], Future[Reply]], record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    answer = in_flight(key)
    began = time.monotonic()
    drained = record_client.lease(key, wait_s=0.1)
    waited = time.monotonic() - began
    assert (drained.pending, drained.records) == (1, [])
    assert waited >= 0.1
    assert not answer.done()
    answer.result()


def test_what_finishes_after_its_batch_was_blocked_is_dropped_and_counted(
    in_flight: Callable[[str], Future[Reply]],
    recording_server: VLLMServer,
    record_client: RecordClient,
    fresh_key: Keys,
) -> None:
    settle(record_client)
    key = fresh_key()
    ask(recording_server, key, SHORT)
    before = stats_of(record_client).recorder
    answer = in_flight(key)
    with record_client.drain(batch_of(key)) as drained:
        assert drained.pending == 1
        record_client.block(batch_of(key))
    assert len(answer.result().samples[0].ids) == LONG_TOKENS  # served all the same
    settle(record_client)
    after = stats_of(record_client).recorder
    assert record_client.get(batch_of(key)) == []
    assert after.dropped["blocked"] == before.dropped.get("blocked", 0) + 1
    assert after.started == before.started + 1
    assert after.recorded == before.recorded
    # Another batch is recorded.
    other = f"other-{key}"
    ask(recording_server, other, SHORT)
    assert len(record_client.get(other)) == 1


def test_a_reward_by_key_reaches_all_that_the_key_has(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key, other = fresh_key(), fresh_key()
    first = ask(recording_server, key, SHORT)
    ask(recording_server, key, follow_up(first))
    ask(recording_server, other, SHORT)
    assert record_client.update_reward(key, 0.5, info={"solved": True}) == 2
    (experience,) = record_client.experiences(key)
    assert experience.reward == 0.5
    assert experience.info == {"solved": True}
    assert only(record_client.runs(other)).reward is None
    # A later turn has the reward too; a later reward wins.
    ask(recording_server, key, SHORT)
    assert [each.reward for each in record_client.experiences(key)] == [0.5, 0.5]
    assert record_client.update_reward(key, -1.0) == 3
    assert only(record_client.runs(key)).reward == -1.0
    with record_client.drain(key) as drained:
        assert [each.reward for each in drained.experiences] == [-1.0, -1.0]


def test_a_reward_for_a_key_without_records_reaches_nothing(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    assert record_client.update_reward(key, 1.0) == 0
    ask(recording_server, key, SHORT)
    assert only(record_client.runs(key)).reward is None


def test_a_reward_by_the_id_of_a_middle_turn_reaches_its_trajectory(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    first = ask(recording_server, key, SHORT)
    second = ask(recording_server, key, follow_up(first))
    ask(recording_server, key, follow_up(second))
    root, middle, leaf = record_client.get(key)
    assert [middle.parent, leaf.parent] == [root.id, middle.id]
    rewards = [0.1, 0.2, 0.3, 0.4]
    updated = record_client.update_reward(
        key, 0.25, sample_ids=[middle.id], token_level_reward=rewards
    )
    assert updated == 1
    (experience,) = record_client.experiences(key)
    assert experience.reward == 0.25
    assert [turn.reward for turn in experience.turns] == [None, 0.25, None]
    start, end = experience.turns[1].start, experience.turns[1].end
    assert experience.token_level_reward[start:end] == pytest.approx(rewards)
    assert experience.token_level_reward.sum() == pytest.approx(1.0)
    with pytest.raises(NothingRecordedError, match="no such record"):
        record_client.update_reward(key, 1.0, sample_ids=["no such record"])


def test_overwriting_a_key_replaces_what_it_has(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    first = ask(recording_server, key, SHORT)
    ask(recording_server, key, SHORT)
    kept = record_client.get(key)[0].replace(reward=2.0)
    assert record_client.overwrite(key, [kept]) == 1
    assert record_client.get(key) == [kept]
    # The run goes on, and is one trajectory.
    ask(recording_server, key, follow_up(first))
    (experience,) = record_client.experiences(key)
    assert experience.turns[0].record_id == kept.id
    assert len(experience.turns) == 2
    assert experience.reward == 2.0


def test_drained_records_come_back_unless_they_are_acknowledged(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key = fresh_key()
    ask(recording_server, key, SHORT)
    record_client.update_reward(key, 0.75)
    drained = record_client.lease(key, lease_s=0.3)
    assert record_client.get(key) == []
    wait_until(lambda: record_client.get(key) != [])
    assert [each.id for each in record_client.get(key)] == [only(drained.records).id]
    assert only(record_client.runs(key)).reward == 0.75
    with pytest.raises(LeaseError, match="has run out"):
        record_client.ack(drained)
    with record_client.drain(key) as drained:
        assert len(drained.records) == 1
    time.sleep(0.5)
    assert record_client.get(key) == []


def test_one_request_id_under_two_keys_is_two_records(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    keys = [fresh_key(), fresh_key()]

    def send(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "x-request-id": "the-same"}
        body = {"model": "model", **SHORT.body, "max_tokens": 50}
        return httpx.post(
            recording_server.base_url + SHORT.path, json=body, headers=headers, timeout=60
        )

    with ThreadPoolExecutor(2) as threads:
        replies = list(threads.map(send, keys))
    assert [reply.status_code for reply in replies] == [200, 200]
    records = [only(record_client.get(key)) for key in keys]
    assert len({record.id for record in records}) == 2
    assert "the-same" in records[0].request_id
    assert records[0].request_id == records[1].request_id
    for record, reply in zip(records, replies, strict=True):
        assert record.response_ids.tolist() == reply.json()["choices"][0]["token_ids"]


def metrics_of(server: VLLMServer) -> dict[str, float]:
    """The recorder's samples on the engine's own metrics page."""
    lines = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("recorder_"))
    return {name: float(value) for name, value in pairs}


def test_the_counters_are_on_the_engines_metrics_and_add_up(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    settle(record_client)
    before = metrics_of(recording_server)
    key = fresh_key()
    first = ask(recording_server, key, SHORT)
    ask(recording_server, key, follow_up(first))
    ask(recording_server, "sk-not-a-key", SHORT)
    settle(record_client)
    after = metrics_of(recording_server)

    def added(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert added("recorder_started_total") == 2
    assert added("recorder_roots_total") == 1
    assert added("recorder_extended_total") == 1
    assert added('recorder_unkeyed_total{reason="not_a_key"}') == 1
    assert added("recorder_store_records") == 2
    assert added("recorder_store_bytes") > 0
    assert after["recorder_pending"] == 0
    stats = stats_of(record_client).recorder
    assert after["recorder_started_total"] == stats.started
    assert after["recorder_errors_total"] == stats.errors
    assert stats.started == stats.recorded + sum(stats.dropped.values()) + stats.pending
    assert stats.recorded == stats.roots + stats.extended


def test_the_page_has_the_text_of_tokens_from_the_engines_tokenizer(
    recording_server: VLLMServer, record_client: RecordClient, fresh_key: Keys
) -> None:
    key, text = fresh_key(), "Grüße 🤖"
    ask(recording_server, key, completions(text, max_tokens=1))
    ids = only(record_client.get(key)).prompt_ids.tolist()
    base, admin = recording_server.base_url, {"Authorization": f"Bearer {ADMIN_KEY}"}
    reply = httpx.post(f"{base}/records/pieces", json={"ids": ids}, headers=admin)
    assert b"".join(map(base64.b64decode, reply.json()["pieces"])).decode() == text
    assert httpx.get(f"{base}/records/view").status_code == 200
    assert httpx.get(f"{base}/records/forest", params={"key": key}).status_code == 401


def test_the_records_ask_for_the_admin_key(recording_server: VLLMServer, fresh_key: Keys) -> None:
    for key in ("", fresh_key(), ADMIN_KEY.upper()):
        with (
            RecordClient(recording_server.base_url, admin_key=key) as client,
            pytest.raises(NotAuthorizedError),
        ):
            client.stats()


def test_the_log_of_a_server_does_not_hold_the_admin_key(
    recording_server: VLLMServer, record_client: RecordClient
) -> None:
    assert record_client.flush()  # the key was used
    log = recording_server.log()
    assert "'enable_recording': True" in log
    assert "/records wants the admin key" in log
    assert ADMIN_KEY not in log
