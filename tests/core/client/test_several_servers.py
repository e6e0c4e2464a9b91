"""Many servers as if they were one, and some of them down."""

from __future__ import annotations

import time

import pytest

from recorder_core import KeyPrefix, RecordKey, assemble
from recorder_core.errors import BadRequestError, NothingRecordedError, ServerUnreachableError
from tests.core.client.servers import KEY, unused_url


def test_one_run_over_two_servers_assembles_as_one(both, server, second_server):
    server.submit(KEY, [1, 2], [3], finished_at=1.0)
    second_server.submit(KEY, [1, 2, 3, 4], [5], finished_at=2.0)
    server.submit(KEY, [1, 2, 3, 4, 5, 6], [7], finished_at=3.0)

    (listed,) = both.keys("0")
    assert (listed.records, listed.rewarded) == (3, 0)
    assert both.update_reward(KEY, 1.0) == 3
    with both.drain("0") as drained:
        (experience,) = drained.experiences
        assert list(experience.tokens) == [1, 2, 3, 4, 5, 6, 7]
        assert experience.reward == 1.0
        assert {lease.url for lease in drained.leases} == {server.url, second_server.url}

    acknowledged = [each.store.stats().counters["acknowledged"] for each in (server, second_server)]
    assert acknowledged == [2, 1]
    assert list(both.stats()) == [server.url, second_server.url]


def test_keys_of_several_servers_are_merged(both, server, second_server):
    server.submit(KEY, [1], [2])
    server.recorder.flush()
    server.clock.now += 5
    generation = second_server.recorder.start(KEY)
    second_server.submit(RecordKey.parse("0/another/0"), [1], [2])

    other, shared = both.keys()

    assert (str(other.key), other.records) == ("0/another/0", 1)
    assert (shared.key, shared.records, shared.pending, shared.age_s) == (KEY, 1, 1, 5.0)
    generation.drop("rejected")


def test_what_concerns_a_key_or_prefix_reaches_every_server(both, server, second_server):
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    assert both.flush() is True
    both.set_version("2")
    assert (server.version, second_server.version) == ("2", "2")
    both.block("1")
    assert both.delete("0") == 2
    assert both.forget(["0"]) == 0
    for each in (server, second_server):
        each.submit(RecordKey.parse("1/task/0"), [1], [2])
        each.recorder.flush()
    assert both.keys("1") == []


def test_overwriting_leaves_the_key_on_one_server_and_longer_keys_alone(
    both, server, second_server
):
    longer = RecordKey.parse("0/task/0/more/0")
    server.submit(KEY, [1], [2], finished_at=1.0)
    second_server.submit(KEY, [1, 2, 3], [4], finished_at=2.0)
    second_server.submit(longer, [1], [2])
    records = [each.replace(reward=3.0) for each in both.get(key=KEY)]

    assert both.overwrite(KEY, records) == 2

    assert [each.records for each in both.keys("")] == [2, 1]
    assert {each.key for each in second_server.store.get(KeyPrefix())} == {longer}
    (experience,) = assemble(both.get(key=KEY))
    assert (list(experience.tokens), experience.reward) == ([1, 2, 3, 4], 3.0)


def test_an_overwrite_that_is_refused_changes_nothing_anywhere(both, server, second_server):
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    foreign = both.get(KEY)[0].replace(key=RecordKey.parse("0/other/0"))

    with pytest.raises(BadRequestError, match="0/other/0"):
        both.overwrite(KEY, [foreign])

    assert [each.records for each in both.keys("")] == [2]


def test_a_drain_with_one_server_down_loses_nothing(connect, server):
    server.submit(KEY, [1], [2])
    down = unused_url()
    client = connect([server.url, down], retries=0)

    with pytest.raises(ServerUnreachableError) as caught, client.drain("0"):
        pytest.fail("the block must not run")

    assert "1 of 2 servers failed" in str(caught.value)
    assert f"POST {down}/records/drain" in str(caught.value)
    assert "what the others handed out was given back" in str(caught.value)
    assert len(connect(server.url).get("0")) == 1
    assert server.store.stats().leases == 0


def test_every_server_that_fails_is_named(connect):
    urls = [unused_url(), unused_url()]
    with pytest.raises(ServerUnreachableError) as caught:
        connect(urls, retries=0).keys()
    assert all(url in str(caught.value) for url in urls)
    assert "can be repeated" not in str(caught.value)


def test_several_servers_are_asked_at_once(both, server, second_server):
    generations = [each.recorder.start(KEY) for each in (server, second_server)]
    started = time.monotonic()

    with both.drain("0", wait_s=1.5) as drained:
        assert drained.pending == 2

    assert 1.5 <= time.monotonic() - started < 2.9  # one after the other they would take 3
    for each in generations:
        each.drop("rejected")


def test_keys_of_several_servers_come_in_pages_each_once(both, server, second_server, monkeypatch):
    """Also where the servers' pages end at other keys."""
    monkeypatch.setattr("recorder_core.client.plans.MAX_KEYS", 3)
    keys = [RecordKey("0", "task", run) for run in range(20)]
    here, there = keys[:9] + keys[15:], keys[6:]
    for owner, owned in ((server, here), (second_server, there)):
        for key in owned:
            owner.submit(key, [1], [2])
    expected = [(key, (key in here) + (key in there)) for key in keys]
    assert [(each.key, each.records) for each in iter(both.keys("0"))] == expected


def test_a_reward_by_reply_id_is_unknown_only_where_no_server_knows_it(both, server, second_server):
    """The servers look it up: no run is downloaded. W6 and W7."""
    server.submit(KEY, [1], [2], request_id="chatcmpl-a")
    second_server.submit(KEY, [1], [3], request_id="cmpl-b-0")
    second_server.submit(KEY, [1], [4], request_id="cmpl-b-0", sample_index=1)

    assert both.update_reward(KEY, 1.0, sample_ids=["chatcmpl-a", ("cmpl-b", 1)]) == 2
    with pytest.raises(NothingRecordedError, match=r"\['neither', \('cmpl-b', 2\)\] stand for no"):
        both.update_reward(KEY, 2.0, sample_ids=["neither", "chatcmpl-a", ("cmpl-b", 2)])

    rewards = {int(each.response_ids[0]): each.reward for each in both.get(key=KEY)}
    assert rewards == {2: 2.0, 3: None, 4: 1.0}


def test_a_block_that_raises_gives_back_what_every_server_handed_out(both, server, second_server):
    """S7."""
    for each in (server, second_server):
        each.submit(KEY, [1], [2])
    with pytest.raises(RuntimeError), both.drain("0"):
        raise RuntimeError("the trainer died")
    assert [each.store.stats().leases for each in (server, second_server)] == [0, 0]
    assert len(both.get("0")) == 2


def test_what_happened_lately_is_told_by_each_server_after_its_own_cursor(
    both, server, second_server
):
    server.submit(KEY, [1], [2], response_text="x" * 300)
    assert both.flush()
    news = both.recent()
    assert list(news) == [server.url, second_server.url]
    (told,) = news[server.url].generations
    assert (told.key, told.response, told.text) == (KEY.text, 1, "x" * 200)
    assert news[second_server.url].generations == []

    second_server.submit(KEY, [1], [3])
    assert both.flush()
    after = {url: each.next for url, each in news.items()}
    later = both.recent(after, wait_s=0.01)
    assert [len(each.generations) for each in later.values()] == [0, 1]


def test_drained_runs_are_read_as_long_as_they_are_remembered(both, server, second_server):
    server.submit(KEY, [1, 2], [3], finished_at=1.0)
    second_server.submit(KEY, [1, 2, 3, 4], [5], finished_at=2.0)
    with both.drain("0"):
        pass
    assert both.runs(KEY) == []
    (experience,) = assemble(both.runs(KEY, drained=True))
    assert list(experience.tokens) == [1, 2, 3, 4, 5]
    both.delete("0")
    assert both.runs(KEY, drained=True) == []
