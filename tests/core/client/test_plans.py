"""What is asked in which round, and what becomes of the rest when one server fails."""

from __future__ import annotations

import pytest

from recorder_core.client import calls, plans
from recorder_core.drained import ServerLease
from recorder_core.errors import RecorderError, ServerFaultError

ONE, OTHER = "http://one", "http://other"
LEASES = [ServerLease(ONE, "a"), ServerLease(ONE, "b"), ServerLease(OTHER, "c")]


def failed(status: int) -> ServerFaultError:
    error = ServerFaultError(f"answered {status}")
    error.status = status
    return error


def test_a_server_that_cannot_save_a_release_is_asked_for_the_next():
    plan = plans.settle(LEASES, calls.release)
    assert list(next(plan)) == [ONE, OTHER]
    # The first is released, on that server's disk or not.
    assert list(plan.send([failed(507), 1])) == [ONE]
    with pytest.raises(RecorderError, match="507"):
        plan.send([1])


def test_a_server_that_fails_is_left_alone():
    plan = plans.settle(LEASES, calls.release)
    next(plan)
    with pytest.raises(RecorderError, match="503"):
        plan.send([failed(503), 1])
