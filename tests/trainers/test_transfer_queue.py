"""Rows drained from several replicas by several processes, in verl's replay buffer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from omegaconf import OmegaConf

ray = pytest.importorskip("ray")
transfer_queue = pytest.importorskip("transfer_queue")
v1 = pytest.importorskip("verl.trainer.ppo.v1.replay_buffer")

from recorder_core import Experience, RecordKey, export  # noqa: E402
from recorder_core.client import RecordClient  # noqa: E402
from recorder_core.export import ExportError  # noqa: E402
from recorder_core.export.transfer_queue import finish, stage  # noqa: E402
from recorder_core.rollout.handmade import records_of  # noqa: E402
from tests.core.rollout.engine import ADMIN_KEY, StandIn, stand_in  # noqa: E402
from tests.trainers import policy  # noqa: E402


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """A TransferQueue on a Ray that says it has room for its three actors, and a task beside."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    units = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(OmegaConf.create(units))
    yield
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture
def replicas() -> Iterator[list[StandIn]]:
    with stand_in() as one, stand_in() as other:
        yield [one, other]


def store(replica: StandIn, experiences: list[Experience]) -> None:
    for each in experiences:
        for record in records_of([each], RecordKey.parse(each.eid.key.text)):
            replica.store.add(record)
        replica.store.update(each.eid.key, reward=each.reward)


def drain(url: str, fail: bool = False) -> list[str]:
    """What runs beside a replica."""
    with RecordClient(url, admin_key=ADMIN_KEY) as records, records.drain("b") as drained:
        groups = stage(export.rows(drained.experiences), global_steps=3)
        if fail:
            raise RuntimeError("it dies before the block ends")
        return groups


@pytest.mark.usefixtures("queue")
def test_rows_from_many_replicas_are_a_batch_of_verls_replay_buffer(
    replicas: list[StandIn],
) -> None:
    recorded = policy.groups(policy.load())
    for n, replica in enumerate(replicas):
        store(replica, recorded[n::2])  # both have runs of both groups
    beside = ray.remote(num_cpus=0.1)(drain)
    urls = [replica.url for replica in replicas]

    with pytest.raises(RuntimeError, match="it dies before the block ends"):
        ray.get(beside.remote(urls[0], fail=True))
    assert replicas[0].store.stats().records == 8  # it was staged, and comes back all the same
    groups = ray.get([beside.remote(url) for url in urls])
    finish(set().union(*groups), global_steps=3)

    assert [replica.store.stats().records for replica in replicas] == [0, 0]
    buffer = v1.ReplayBuffer("sync", OmegaConf.create(), None, "drop", OmegaConf.create())
    found, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    assert len(found.keys) == len(recorded)  # no run twice
    data = transfer_queue.kv_batch_get(keys=found.keys, partition_id="train")
    expected = {str(each.eid.key): each for each in recorded}
    for n, run in enumerate(data["run"]):
        each = expected.pop(str(getattr(run, "data", run)))
        assert data["input_ids"][n].tolist() == each.tokens.tolist()
        assert data["response_mask"][n].tolist() == each.action_mask.astype(int).tolist()
        logprobs = np.nan_to_num(each.logprobs)
        assert data["rollout_log_probs"][n].numpy() == pytest.approx(logprobs)
        assert float(data["rm_scores"][n].sum()) == each.reward
        assert found.tags[n]["min_global_steps"] == 1
    assert not expected


def test_a_run_without_a_reward_is_refused() -> None:
    run = policy.trajectory(policy.load(), "sum", 0, reward=None)

    with pytest.raises(ExportError, match="b/sum/0 has no reward"):
        stage(export.rows([run], export.Rules(missing_reward="keep")), global_steps=1)
