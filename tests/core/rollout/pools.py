"""Which runners the tests use: processes, or with RECORDER_TEST_POOL=ray actors on a real Ray."""

from __future__ import annotations

import os
import sys
from functools import cache

from recorder_core.rollout import LocalRunnerPool, RunnerPool

ON_RAY = os.environ.get("RECORDER_TEST_POOL") == "ray"


@cache
def cluster() -> None:
    """Start a cluster on this machine; it ends with this process."""
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )


def pool_of(count: int) -> RunnerPool:
    """A new pool of the kind that the tests use."""
    if not ON_RAY:
        return LocalRunnerPool(count)
    from recorder_core.rollout.ray_pool import RayRunnerPool

    cluster()
    return RayRunnerPool(count, num_cpus=0.1)
