"""Logprobs that only the recorder asked for: one column per engine step, not an object per token.

vLLM sends logprobs as three small arrays for each request and step. Where the recorder alone asked,
the engine core takes them off its outputs and appends one further output, whose id no request has
and which holds the sampled tokens' values and the positions of their outputs. The API server takes
it off before vLLM sees it, and gives each output its values. Nothing is held back from one step to
the next: aborts, preemptions and crashes need nothing of their own.

A request takes part if it is marked. Where a side cannot take part no request is marked, or the
mark is without effect, and logprobs come as vLLM sends them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
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

# In `extra_args`, which clients can set: the value is bytes, which no JSON holds.
_NAME, _MARK = "vllm_recorder", b"column"
_NO_RANKS = np.empty(0, np.int32)
_warn = Throttle(logger)


class Chosen(msgspec.Struct, gc=False):
    """The logprobs of one output's tokens; stands where vLLM has a `LogprobsLists`."""

    values: list[float]

    def slice_request(self, start: int, count: int) -> Chosen:
        """Called by vLLM to cut what a stop string cuts off."""
        return Chosen(self.values[start : start + count])


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
            step = _Step.of(scheduler, scheduler_output, model_runner_output)
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


class _Step:
    """The logprobs of one step of the engine core, and whose of them go into a column."""

    __slots__ = ("_index", "_logprobs", "_marked")

    def __init__(self, logprobs: LogprobsLists, index: dict[str, int], marked: set[str]) -> None:
        self._logprobs = logprobs
        self._index = index
        self._marked = marked

    @classmethod
    def of(cls, scheduler: Any, scheduled: Any, sampled: Any) -> _Step | None:
        """Before the scheduler's own work, which forgets the requests that finish.

        Returns:
            None where no marked request is part of the step.
        """
        logprobs = sampled.logprobs
        if logprobs is None:
            return None
        marked, others = set(), False
        for request_id in scheduled.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            params = request and request.sampling_params
            if params is None:
                continue
            if params.extra_args and params.extra_args.get(_NAME) == _MARK:
                marked.add(request_id)
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
        ours = [each for each in enumerate(outputs) if each[1].request_id in self._marked]
        positions: list[int] = []
        rows: list[int] = []
        for position, output in ours:
            # As `LogprobsLists.slice_request` finds them.
            row = self._index[output.request_id]
            row = row if starts is None else starts[row]
            for token in range(len(output.new_token_ids)):
                positions.append(position)
                rows.append(row + token)
        # [tokens, 1 + top-k]: the sampler puts the sampled token first.
        column = column_of(positions, self._logprobs.logprobs[rows, 0])
        for _, output in ours:
            output.new_logprobs = None
        if positions:
            outputs.append(column)


def column_of(positions: Sequence[int], values: AnyArray) -> EngineCoreOutput:
    """The output that holds a step's column.

    Args:
        positions: [tokens] The place of each token's output in the list of outputs.
        values: float32 [tokens]
    """
    column = LogprobsLists(np.array(positions, np.int32), values, _NO_RANKS)
    return EngineCoreOutput(COLUMN, [], new_logprobs=column)


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
                distribute(outputs, outputs.pop().new_logprobs)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("a step's logprobs are lost")
        return step

    def mark(self, params: Any) -> bool:
        """Ask for a request's logprobs in columns.

        Args:
            params: The request's sampling parameters, not those of its client.

        Returns:
            Whether they will come so.
        """
        if self.fallback or not self._arriving:
            return False
        params.extra_args = {**(params.extra_args or {}), _NAME: _MARK}
        return True

    def missing(self) -> None:
        """The logprobs of a marked request came as vLLM sends them."""
        if not self.fallback:
            self._fall_back("the engine core sends none")

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        logger.warning("Logprobs come one object per token, which costs more: %s", reason)
        self._describe()

    def _describe(self) -> None:
        how = f"an object per token: {self.fallback}" if self.fallback else "a column per step"
        self.recorder.describe("logprobs", how)


def distribute(outputs: Sequence[Any], column: LogprobsLists) -> None:
    """Give a step's outputs the values of its column."""
    positions, values = column.logprob_token_ids.tolist(), column.logprobs.tolist()
    for position, value in zip(positions, values, strict=True):
        output = outputs[position]
        if output.new_logprobs is None:
            output.new_logprobs = Chosen([value])
        else:
            output.new_logprobs.values.append(value)
