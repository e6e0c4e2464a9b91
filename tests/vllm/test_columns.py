"""Columns without an engine: whatever the order of things, values find their generations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import Recorder
from vllm_recorder import column
from vllm_recorder.column import Chosen, Columns, column_of, output_of


class Core:
    """Hands out what it is given, as an engine core's client in this process does."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def get_output(self) -> Any:
        return SimpleNamespace(outputs=self.sent.pop(0))


class Request:
    """A request in an engine core: the logprobs that were sampled for it so far."""

    def __init__(self, columns: Columns) -> None:
        params = SimpleNamespace(extra_args=None)
        chosen = columns.mark(params)
        assert chosen is not None
        self.chosen: Chosen = chosen
        self.number = int.from_bytes(params.extra_args["vllm_recorder"], "little")
        self.values: list[float] = []


class Engine:
    """As much of an engine as columns see of one."""

    def __init__(self, recorder: Recorder) -> None:
        self.engine_core = Core()
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))
        self.columns = Columns(self, recorder)
        self._random = np.random.default_rng(0)

    def step(self, tokens: dict[Request, int], *, lost: bool = False) -> None:
        """Sample so many tokens for each of some requests."""
        numbers, places, values = [], [], []
        for request, count in tokens.items():
            sampled = self._random.normal(size=count).astype(np.float32).tolist()
            numbers += [request.number] * count
            places += range(len(request.values), len(request.values) + count)
            values += sampled
            request.values += sampled
        if not lost and numbers:
            packed = column_of(numbers, places, np.array(values, np.float32))
            self.engine_core.sent.append([output_of(packed)])
            assert self.engine_core.get_output().outputs == []

    def alone(self, request: Request, count: int) -> None:
        """Sample tokens whose logprobs come as vLLM sends them."""
        sampled = self._random.normal(size=count).astype(np.float32)
        self.columns.came_alone(request.chosen, sampled)
        request.values += sampled.tolist()


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()
    assert made.stats().errors == 0


@given(data=st.data(), room=st.sampled_from([0, 40, 400, 1 << 17]))
def test_a_generation_has_its_own_values_in_order(
    data: st.DataObject, room: int, recorder: Recorder
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column, "ASIDE_BYTES", room)
        engine = Engine(recorder)
        running: list[Request] = []
        for _ in range(data.draw(st.integers(1, 30))):
            act = data.draw(st.sampled_from(["start", "step", "step", "step", "alone", "end"]))
            if act == "start":
                # What came alone once is asked for in no column again.
                engine.columns.fallback = ""
                running.append(Request(engine.columns))
            elif act == "step":
                engine.step({each: data.draw(st.integers(0, 3)) for each in running})
            elif running:
                request = data.draw(st.sampled_from(running))
                if act == "alone":
                    engine.alone(request, data.draw(st.integers(1, 2)))
                else:  # a stop string may have cut off some
                    running.remove(request)
                    count = data.draw(st.integers(0, len(request.values)))
                    found = engine.columns.logprobs_of(request.chosen, count)
                    assert found.tolist() == request.values[:count]
        for request in running:
            found = engine.columns.logprobs_of(request.chosen, len(request.values))
            assert found.tolist() == request.values


@given(
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=10),
    data=st.data(),
    room=st.sampled_from([0, 1 << 17]),
)
def test_a_lost_step_is_never_made_up_for(
    steps: list[int], data: st.DataObject, room: int, recorder: Recorder
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column, "ASIDE_BYTES", room)
        engine = Engine(recorder)
        request, beside = Request(engine.columns), Request(engine.columns)
        lost = data.draw(st.integers(0, len(steps) - 1))
        for number, count in enumerate(steps):
            engine.step({request: count}, lost=number == lost)
            engine.step({beside: count})
        end = sum(steps[: lost + 1])
        count = data.draw(st.integers(end, len(request.values)))
        assert len(engine.columns.logprobs_of(request.chosen, count)) < count
        assert engine.columns.logprobs_of(beside.chosen, sum(steps)).tolist() == beside.values


def test_generations_end_on_one_thread_while_columns_come_on_another(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column, "ASIDE_BYTES", 2000)
    engine = Engine(recorder)
    ended: SimpleQueue[Request | None] = SimpleQueue()
    wrong: list[Request] = []

    def end() -> None:
        while (request := ended.get()) is not None:
            count = len(request.values)
            if engine.columns.logprobs_of(request.chosen, count).tolist() != request.values:
                wrong.append(request)

    thread = threading.Thread(target=end)
    thread.start()
    running: list[Request] = []
    for number in range(3000):
        if number % 2 == 0:
            running.append(Request(engine.columns))
        engine.step(dict.fromkeys(running, 1 + number % 2))
        if len(running) > 20:
            ended.put(running.pop(number % 20))
    for request in running:
        ended.put(request)
    ended.put(None)
    thread.join(60)
    assert not thread.is_alive()
    assert not wrong
    del running, request
    engine.columns._give_out()
    # Nothing is kept of what has ended, but of the last, which this thread's frame may hold.
    assert len(engine.columns._requests) <= 1
