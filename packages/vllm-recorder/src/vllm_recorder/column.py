"""Logprobs that only the recorder asked for: one column per engine step, not an object per token.

vLLM sends logprobs as three small arrays for each request and step. Where the recorder alone asked,
the engine core takes them off its outputs and appends one further output, whose id no request has
and which holds, for each sampled token, its request's number, its place in the response and its
logprob. The API server takes it off before vLLM sees it and puts it aside, whole: the event loop
does nothing for a token. When a generation has ended, the recorder's thread looks its values up.
Nothing is held back in the engine core: aborts, preemptions and crashes need nothing of their own.

A request takes part if it is marked with a number. Where a side cannot take part no request is
marked, or the mark is without effect, and logprobs come as vLLM sends them.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from recorder_core.arrays import AnyArray
from recorder_core.errors import UnsupportedEngineError
from recorder_core.intake import Intake
from recorder_core.throttle import Throttle
from vllm_recorder import compat

logger = logging.getLogger("vllm.recorder")

SWITCH = "RECORDER_VLLM_COLUMN"
"""The environment variable that turns columns off where it is `0`."""
COLUMN = "\0vllm_recorder"
"""The id of the output that holds a step's column."""

ASIDE_BYTES = 1 << 17
"""Columns that are put aside, at most: to give so many to their requests takes a millisecond."""

# In `extra_args`, which clients can set: the value is bytes, which no JSON holds.
_NAME = "vllm_recorder"
_NUMBER_BYTES = 4
_MAX_NUMBER = 2**31 - 1
_NEXT = -1
"""The place of a token whose engine core did not tell it."""
_warn = Throttle(logger)


def instrument(scheduler: type) -> None:
    """In an engine core: let a class of schedulers send columns, if it is vLLM's; idempotent.

    Raises:
        UnsupportedEngineError: The method to wrap is not as expected.
    """
    owner = _owner(scheduler)
    if _is_vllms(owner) and owner not in _instrumented:
        expected = ["self", "scheduler_output", "model_runner_output"]
        compat.SUPPORT.check_parameters(owner, "update_from_output", expected)
        owner.update_from_output = _with_columns(owner.update_from_output)
        _instrumented.add(owner)


_instrumented: set[type] = set()


def _owner(scheduler: type) -> Any:
    """The class whose `update_from_output` a scheduler has."""
    return next(each for each in scheduler.__mro__ if "update_from_output" in vars(each))


def _is_vllms(owner: type) -> bool:
    # A scheduler of another's making may not expect an output that no request has.
    return owner.__module__.startswith("vllm.")


def _with_columns(update_from_output: Callable[..., dict[int, Any]]) -> Any:
    @functools.wraps(update_from_output)
    def with_columns(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        try:
            step = Step.of(scheduler, scheduler_output, model_runner_output)
        except Exception:  # noqa: BLE001 - the engine comes first: this step goes vLLM's own way
            step = None
            _warn.warning("a step's logprobs are not sent as a column", exc_info=True)
        outputs = update_from_output(scheduler, scheduler_output, model_runner_output)
        if step is not None:
            try:
                for each in outputs.values():
                    step.append_column(each.outputs)
            except Exception:  # noqa: BLE001 - the engine comes first; the records are flagged
                _warn.warning("a step's logprobs are lost", exc_info=True)
        return outputs

    return with_columns


class Step:
    """The logprobs of one step of the engine core, and whose of them go into a column."""

    __slots__ = ("_index", "_logprobs", "_marked")

    def __init__(
        self, logprobs: LogprobsLists, index: dict[str, int], marked: dict[str, tuple[int, int]]
    ) -> None:
        self._logprobs = logprobs
        self._index = index
        self._marked = marked

    @classmethod
    def of(cls, scheduler: Any, scheduled: Any, sampled: Any) -> Step | None:
        """Before the scheduler's own work, which forgets the requests that finish.

        Returns:
            None where no marked request is part of the step.
        """
        logprobs = sampled.logprobs
        if logprobs is None:
            return None
        marked: dict[str, tuple[int, int]] = {}
        others = False
        for request_id in scheduled.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            params = request and request.sampling_params
            if params is None:
                continue
            mark = params.extra_args.get(_NAME) if params.extra_args else None
            if type(mark) is bytes:
                marked[request_id] = int.from_bytes(mark, "little"), request.num_output_tokens
            elif params.num_logprobs is not None:
                others = True
        if not marked:
            return None
        step = cls(logprobs, sampled.req_id_to_index, marked)
        if not others:
            sampled.logprobs = None  # the scheduler need not cut them up
        return step

    def append_column(self, outputs: list[EngineCoreOutput]) -> None:
        """Move the marked requests' logprobs from the outputs for one client to a further one."""
        starts = self._logprobs.cu_num_generated_tokens
        numbers: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for output in outputs:
            mark = self._marked.get(output.request_id)
            if mark is None:
                continue
            output.new_logprobs = None
            number, place = mark
            # As `LogprobsLists.slice_request` finds them.
            row = self._index[output.request_id]
            row = row if starts is None else starts[row]
            for token in range(len(output.new_token_ids)):
                numbers.append(number)
                places.append(place + token)
                rows.append(row + token)
        if numbers:
            # [tokens, 1 + top-k]: the sampler puts the sampled token first.
            values = self._logprobs.logprobs[rows, 0]
            outputs.append(output_of(column_of(numbers, places, values)))


def mark_of(number: int) -> dict[str, bytes]:
    """What marks a request with a number, among its `extra_args`."""
    return {_NAME: number.to_bytes(_NUMBER_BYTES, "little")}


def column_of(numbers: Sequence[int], places: Sequence[int], values: AnyArray) -> bytes:
    """A step's column: int32 [3, tokens], the last row float32 by its bits.

    Args:
        numbers: [tokens] What each token's request is marked with.
        places: [tokens] Where each token is in its response.
        values: float32 [tokens] Its logprob.
    """
    bits = values.astype(np.float32, copy=False).view(np.int32)
    return np.array([numbers, places, bits], np.int32).tobytes()


def runs_of(columns: AnyArray) -> Iterator[tuple[int, int, bytes]]:
    """Cut columns, int32 [3, tokens], into tokens that follow one another in one response.

    Yields:
        The request's number, the first token's place, and the values, float32, packed.
    """
    numbers, places, bits = columns
    if not len(numbers):
        return
    cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(numbers)]
    firsts, values = bounds[:-1], bits.tobytes()
    for number, place, (begin, end) in zip(
        numbers[firsts].tolist(), places[firsts].tolist(), pairwise(bounds), strict=True
    ):
        yield number, place, values[4 * begin : 4 * end]


def output_of(column: bytes) -> EngineCoreOutput:
    """The output that carries a column: in a field that vLLM sends as it is, and does not read."""
    return EngineCoreOutput(COLUMN, [], kv_transfer_params={COLUMN: column})


class Chosen:
    """The logprobs of one request's tokens, as far as they have been given to it."""

    __slots__ = ("__weakref__", "_lost", "_values", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._values = array("f")
        self._lost = False

    def take(self, place: int, values: bytes) -> None:
        """Take the next tokens' values; where some before them are lost, all are.

        Args:
            place: Where the first of the tokens is in the response; `_NEXT`: it comes next.
            values: float32 [tokens], packed.
        """
        if place not in (len(self._values), _NEXT):
            self._lost = True
        if not self._lost:
            self._values.frombytes(values)

    def first(self, count: int) -> array[float]:
        """Those of the response, without what a stop string cut off; none where some are lost."""
        return array("f") if self._lost else self._values[:count]


class Columns:
    """In an API server: takes the columns off what an engine core sends; one for each engine.

    Args:
        engine: An `AsyncLLM` or `LLMEngine`.
        recorder: Where faults are counted.
    """

    def __init__(self, engine: Any, recorder: Intake) -> None:
        self.recorder = recorder
        self.fallback = ""
        """Why logprobs come as vLLM sends them; empty while they come in columns."""
        self._arriving = False
        self._requests: dict[int, ref[Chosen]] = {}
        """By number; those whose generations have ended go when columns are given out."""
        self._marked = 0
        self._aside: deque[bytes] = deque()
        """Columns as they came; the event loop appends, whoever holds the lock takes."""
        self._aside_bytes = 0
        self._lock = threading.Lock()
        self._gathered: AnyArray = np.empty((3, 0), np.int32)
        """The columns that were aside, end to end; not yet given to their requests."""
        try:
            self._wrap(engine)
        except (AttributeError, UnsupportedEngineError) as reason:
            self._fall_back(str(reason))

    @classmethod
    def of(cls, engine: Any, recorder: Intake) -> Columns:
        """Those of an engine. They stay when a hook is removed: requests in flight are marked."""
        if not hasattr(engine, "_recorder_columns"):
            engine._recorder_columns = cls(engine, recorder)
        columns: Columns = engine._recorder_columns
        columns.recorder = recorder
        columns._describe()
        return columns

    def _wrap(self, engine: Any) -> None:
        if os.environ.get(SWITCH) == "0":
            raise UnsupportedEngineError(f"{SWITCH} is 0")
        scheduling = engine.vllm_config.scheduler_config
        # vLLM's default is not looked at here: importing it takes more than a second.
        if scheduling.scheduler_cls is not None:
            owner = _owner(scheduling.get_scheduler_cls())
            if not _is_vllms(owner):
                raise UnsupportedEngineError(f"the scheduler is a {owner.__qualname__}, not vLLM's")
        core = engine.engine_core
        if hasattr(engine, "update_weight_version"):  # an AsyncLLM
            compat.SUPPORT.check_parameters(core, "get_output_async", [])
            core.get_output_async = self._async(core.get_output_async)
        else:
            compat.SUPPORT.check_parameters(core, "get_output", [])
            core.get_output = self._sync(core.get_output)
            self._arriving = True

    def _async(self, get_output_async: Any) -> Any:
        @functools.wraps(get_output_async)
        async def with_columns() -> Any:
            # vLLM's loop may have been waiting in its own method when this one was put there: it
            # would not take the first column off.
            self._arriving = True
            return self._taken_off(await get_output_async())

        return with_columns

    def _sync(self, get_output: Any) -> Any:
        @functools.wraps(get_output)
        def with_columns() -> Any:
            return self._taken_off(get_output())

        return with_columns

    def _taken_off(self, step: Any) -> Any:
        try:
            outputs = step.outputs
            if outputs and outputs[-1].request_id == COLUMN:
                self.put_aside(outputs.pop().kv_transfer_params[COLUMN])
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("a step's logprobs are lost")
        return step

    def put_aside(self, column: bytes) -> None:
        """On the event loop: take the next step's column."""
        self._aside.append(column)
        self._aside_bytes += len(column)
        # Where the recorder's thread is at it, there is less of them in a moment.
        if self._aside_bytes > ASIDE_BYTES and self._lock.acquire(blocking=False):
            try:
                self._give_out()
            finally:
                self._lock.release()

    def _gather(self) -> AnyArray:
        columns = [self._gathered]
        while self._aside:
            columns.append(np.frombuffer(self._aside.popleft(), np.int32).reshape(3, -1))
        if len(columns) > 1:
            self._gathered = np.concatenate(columns, axis=1)
        return self._gathered

    def _give_out(self) -> None:
        """Give all that is aside to its requests."""
        gathered = self._gather()
        self._gathered, self._aside_bytes = np.empty((3, 0), np.int32), 0
        by_request = gathered[:, np.argsort(gathered[0], kind="stable")]
        for number, place, values in runs_of(by_request):
            request = self._requests.get(number)
            chosen = request() if request is not None else None
            if chosen is not None:
                chosen.take(place, values)
        for number, request in self._requests.copy().items():
            if request() is None:
                del self._requests[number]

    def logprobs_of(self, chosen: Chosen, count: int) -> array[float]:
        """On the recorder's thread: the logprobs of a generation that has ended.

        Args:
            chosen: What `mark` gave for its request.
            count: Tokens of the response.

        Returns:
            [count]; fewer, where some are lost.
        """
        try:
            with self._lock:
                gathered = self._gather()
                for _, place, values in runs_of(gathered[:, gathered[0] == chosen.number]):
                    chosen.take(place, values)
            return chosen.first(count)
        except Exception:  # noqa: BLE001 - it costs the logprobs, not the record
            self.recorder.count_error("a generation's logprobs are lost")
            return array("f")

    def mark(self, params: Any) -> Chosen | None:
        """Ask for a request's logprobs in columns.

        Args:
            params: The request's sampling parameters, not those of its client.

        Returns:
            What they are looked up by; None: they come as vLLM sends them.
        """
        if self.fallback or not self._arriving:
            return None
        self._marked = self._marked % _MAX_NUMBER + 1
        chosen = Chosen(self._marked)
        self._requests[self._marked] = ref(chosen)
        params.extra_args = {**(params.extra_args or {}), **mark_of(self._marked)}
        return chosen

    def came_alone(self, chosen: Chosen, values: AnyArray) -> None:
        """On the event loop: a marked request's logprobs came as vLLM sends them.

        Args:
            chosen: What `mark` gave for the request.
            values: float32 [tokens]
        """
        count = len(values)
        self.put_aside(column_of([chosen.number] * count, [_NEXT] * count, values))
        if not self.fallback:
            self._fall_back("the engine core sends none")

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        logger.warning("Logprobs come one object per token, which costs more: %s", reason)
        self._describe()

    def _describe(self) -> None:
        how = f"an object per token: {self.fallback}" if self.fallback else "a column per step"
        self.recorder.describe("logprobs", how)
