"""The only code that touches vLLM's internals: from its output processor to a finished `Turn`.

Every way out of a generation (finished, stopped by a string, aborted, client gone; streamed or
not; each of n samples) ends in `RequestState.make_request_output` with a finish reason. Requests
that are to be recorded get a `RequestState` of our subclass, which hands the finished state over
there. Requests that are not recorded are left exactly as they were.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import vllm
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState

from recorder_core.context import MISSING, Identity, current_identity, identify
from recorder_core.engines import VersionLabels
from recorder_core.errors import UnsupportedEngineError
from recorder_core.recorder import Pending, Recorder
from recorder_core.records import (
    FinishReason,
    MultiModalItem,
    RoutedExperts,
    Sampling,
    Turn,
    VersionSpan,
)
from vllm_recorder import compat

_MISSING = float("nan")
_BEAM = re.compile(r"-beam-\d+$")
"""vLLM's beam search makes a request of each step of each beam; none is a sample."""

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,  # vLLM ended a generation that repeats itself; flagged
}


class ChosenLogprobs(LogprobsProcessor):
    """Keeps the sampled token's logprob for the recorder, and nothing for the client.

    A client that asked for no logprobs must see none, so `logprobs` stays None.
    """

    chosen: array[float]
    recorder: Recorder

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        # A fault here would end vLLM's output loop, for every request. What is missing then is
        # flagged by the recorder: the record has fewer logprobs than ids.
        try:
            # [tokens, 1 + top-k]: the sampler puts the sampled token first.
            values = logprobs_lists.logprobs
            if len(values) == 1:
                self.chosen.append(values.item(0))
            else:
                self.chosen.extend(values[:, 0].tolist())
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("a logprob could not be read")


class RecordedRequest(RequestState):
    """A request whose generation is recorded."""

    recording: Recording

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: EngineFinishReason | None,
        stop_reason: int | str | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's; on the last call the finished state is handed to the recorder."""
        if finish_reason is not None:
            self.recording.finish(self, finish_reason, stop_reason)
        return super().make_request_output(
            new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs
        )


class UnrecordedRequest(RequestState):
    """A request that is not recorded, of an engine that returns routed experts for us alone."""

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: EngineFinishReason | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's; the reply shows no routed experts."""
        if finish_reason is not None:
            self.routed_experts_chunks: list[Any] = []
        return super().make_request_output(
            new_token_ids, pooling_output, finish_reason, *args, **kwargs
        )


class Recording:
    """What the hook knows of one generation beyond vLLM's own state."""

    __slots__ = ("_arrived", "_attempt", "_hook", "_multi_modal", "_params", "_pending", "labels")

    def __init__(self, hook: Hook, pending: Pending, request: Any, attempt: int) -> None:
        self._hook = hook
        self._pending = pending
        self._params = request.sampling_params
        self._attempt = attempt
        self._arrived = request.arrival_time
        # Read here: the features hold images, which must not live as long as the generation.
        self._multi_modal = _multi_modal(request.mm_features)
        self.labels = VersionLabels(hook.version)  # used where the engine reports no spans

    def finish(
        self, state: RecordedRequest, finish_reason: EngineFinishReason, stop_reason: Any
    ) -> None:
        """The generation is over; a fault here costs its record, never the reply."""
        try:
            self._pending.finish(self._turn(state, finish_reason, stop_reason))
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self._pending.drop("error")
            self._hook.recorder.count_error("request %s was not recorded", state.external_req_id)

    def _turn(
        self, state: RecordedRequest, finish_reason: EngineFinishReason, stop_reason: Any
    ) -> Turn:
        detokenizer = state.detokenizer
        response_ids = detokenizer.output_token_ids
        versions, flags = self._versions(state, len(response_ids))
        reason = str(finish_reason)
        if reason == "repetition":
            flags = (*flags, reason)
        return Turn(
            key=self._pending.key,
            prompt_ids=state.prompt_token_ids,
            response_ids=response_ids,
            finish_reason=_FINISH[reason],
            logprobs=_logprobs_of(state.logprobs_processor, response_ids),
            versions=versions,
            stop_reason=stop_reason,
            prompt_text=state.prompt,
            response_text=getattr(detokenizer, "output_text", None),
            routed_experts=self._routed(state, len(response_ids)),
            sampling=self._hook.sampling(self._params),
            adapter=state.lora_name,
            multi_modal=self._multi_modal,
            request_id=state.external_req_id,
            sample_index=state.request_index,
            attempt=self._attempt,
            cached_tokens=state.num_cached_tokens,
            created_at=self._arrived,
            finished_at=time.time(),
            flags=flags,
        )

    def _versions(
        self, state: RecordedRequest, count: int
    ) -> tuple[Sequence[VersionSpan], tuple[str, ...]]:
        if self._hook.engine_reports_spans:
            spans = state._weight_version_spans() or ()
            return [VersionSpan(each.start, each.end, each.version) for each in spans], ()
        return self.labels.spans(count)

    def _routed(self, state: RecordedRequest, count: int) -> Any:
        chunks = state.routed_experts_chunks
        if not chunks:
            return None
        if self._hook.hide_routed_experts:
            state.routed_experts_chunks = []
        start = getattr(self._params, "routed_experts_prompt_start", 0) or 0
        rows = state.prompt_len + count - 1
        return lambda: _join_routed(chunks, start, rows)


def _join_routed(chunks: list[Any], start: int, rows: int) -> RoutedExperts | None:
    data = np.concatenate(chunks, axis=0)
    # Rows beyond the kept tokens belong to what a stop string cut off.
    return RoutedExperts(data=data[: max(rows - start, 0)], start=start)


def _logprobs_of(processor: Any, response_ids: Sequence[int]) -> Any:
    if isinstance(processor, ChosenLogprobs):
        return processor.chosen
    asked = processor.logprobs
    # The client's own, looked up by id on the recorder's thread: [tokens] of {id: logprob}.
    return lambda: _chosen_of(asked, response_ids)


def _chosen_of(asked: Sequence[Any], response_ids: Sequence[int]) -> Sequence[float]:
    if len(asked) != len(response_ids):
        return [_MISSING] * len(asked)  # the recorder flags the unequal lengths
    # By id, wherever it ranks: the sampled token may lie outside the top k.
    return [
        at[token].logprob if token in at else _MISSING
        for at, token in zip(asked, response_ids, strict=True)
    ]


def _multi_modal(features: Any) -> tuple[MultiModalItem, ...]:
    return tuple(
        MultiModalItem(
            modality=each.modality,
            offset=each.mm_position.offset,
            length=each.mm_position.length,
            identity=str(each.identifier),
        )
        for each in features or ()
    )


class Hook:
    """Records the generations of one engine.

    Args:
        engine: An `AsyncLLM` or `LLMEngine`.
        recorder: Where turns go.
        version: The label of the engine's weights now.
        hide_routed_experts: Keep routed experts out of the engine's own replies.
    """

    def __init__(
        self, engine: Any, recorder: Recorder, *, version: str, hide_routed_experts: bool
    ) -> None:
        self.recorder = recorder
        self.version = version
        self.hide_routed_experts = hide_routed_experts
        self.engine_reports_spans = hasattr(RequestState, "_weight_version_spans")
        self._engine = engine
        self._processor = engine.output_processor
        self._add_request = self._processor.add_request
        self._logprobs_mode = str(engine.vllm_config.model_config.logprobs_mode)
        self._processor.add_request = self.add_request
        # AsyncLLM's is a coroutine, LLMEngine's a function.
        self._is_async = hasattr(engine, "update_weight_version")
        self._relabel_name = "update_weight_version" if self._is_async else "set_weight_version"
        self._relabel = getattr(engine, self._relabel_name)
        setattr(engine, self._relabel_name, self._relabel_async if self._is_async else self.relabel)

    def remove(self) -> None:
        """Later requests are not recorded."""
        self._processor.add_request = self._add_request
        setattr(self._engine, self._relabel_name, self._relabel)

    async def _relabel_async(self, version: str) -> None:
        await self._relabel(version)
        self._labelled(version)

    def relabel(self, version: str) -> None:
        """As the engine's; the generations in flight learn the label of what comes next."""
        self._relabel(version)
        self._labelled(version)

    def _labelled(self, version: str) -> None:
        self.version = version
        for state in list(self._processor.request_states.values()):
            if isinstance(state, RecordedRequest) and state.detokenizer is not None:
                state.recording.labels.change(version, state.detokenizer.num_output_tokens())

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As the output processor's; then takes the request's state over."""
        result = self._add_request(request, *args, **kwargs)
        try:
            self._attach(request)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("request %s is not recorded", request.request_id)
        return result

    def _attach(self, request: Any) -> None:
        params = request.sampling_params
        if params is None:
            return  # pooling: nothing is generated
        state = self._processor.request_states[request.request_id]
        if isinstance(state, RecordedRequest):
            return
        if self.hide_routed_experts:
            state.__class__ = UnrecordedRequest  # unless it turns out below to be recorded
        identity = current_identity()
        if identity is None:
            identity = _identity_of(params)
        if identity.key is None:
            self.recorder.count_unkeyed(identity.reason)
            return
        pending = self.recorder.start(identity.key)
        refusal = _refusal(request)
        if refusal:
            pending.drop(refusal)
            return
        try:
            self._take_over(request, state, Recording(self, pending, request, identity.attempt))
        except Exception:
            pending.drop("error")
            raise

    def _take_over(self, request: Any, state: Any, recording: Recording) -> None:
        state.recording = recording
        state.__class__ = RecordedRequest
        if request.sampling_params.num_logprobs is None:
            processor = state.logprobs_processor
            processor.chosen = array("f")
            processor.recorder = self.recorder
            processor.__class__ = ChosenLogprobs
            # 0 asks the engine for the sampled token's logprob only. On a copy: the state above
            # was made from the client's own parameters, and so its reply is. Last, as vLLM's own
            # processor takes logprobs that were not asked for as a fault of the engine.
            params = copy(request.sampling_params)
            params.logprobs = 0
            request.sampling_params = params

    def sampling(self, params: Any) -> Sampling:
        """How a generation is sampled."""
        return _sampling(
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.seed,
            self._logprobs_mode,
        )


@functools.lru_cache(maxsize=1024)
def _sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None, mode: str
) -> Sampling:
    # Requests are sampled alike: their records share one object, which is immutable.
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs_mode=mode,
    )


def _identity_of(params: Any) -> Identity:
    extra = params.extra_args
    return identify(str(extra["record_key"])) if extra and "record_key" in extra else MISSING


def _refusal(request: Any) -> str:
    """Why a request that carries a key cannot be recorded; empty if it can."""
    if request.resumable:
        return "streaming_input"
    if request.prompt_token_ids is None:
        return "prompt_embeds"
    if _BEAM.search(request.external_req_id or ""):
        return "beam_search"
    return ""


def install(
    engine: Any,
    recorder: Recorder | None = None,
    *,
    version: str | None = None,
    hide_routed_experts: bool = False,
) -> Recorder:
    """Hook an engine; see `vllm_recorder.install`.

    Args:
        engine: An `LLM`, `LLMEngine` or `AsyncLLM`.
        recorder: Where turns go; a new one by default.
        version: The label of the engine's weights now; asked of the engine where it answers
            without an event loop.
        hide_routed_experts: Keep routed experts out of the engine's own replies.

    Raises:
        UnsupportedEngineError: The engine cannot be recorded.
    """
    compat.check_version(vllm.__version__)
    engine = getattr(engine, "llm_engine", engine)
    processor = getattr(engine, "output_processor", None)
    if processor is None:
        raise UnsupportedEngineError(
            f"{type(engine).__name__} has no output processor in this process; give install() "
            "an LLM, LLMEngine or AsyncLLM"
        )
    installed: Hook | None = getattr(processor, "_recorder_hook", None)
    if installed is not None:
        return installed.recorder
    compat.check_hook_points(processor)
    if version is None:
        get_version = engine.get_weight_version
        version = "" if inspect.iscoroutinefunction(get_version) else get_version()
    recorder = recorder or Recorder()
    processor._recorder_hook = Hook(
        engine, recorder, version=version, hide_routed_experts=hide_routed_experts
    )
    return recorder


def uninstall(engine: Any) -> None:
    """Undo `install`."""
    processor = getattr(engine, "llm_engine", engine).output_processor
    hook: Hook | None = getattr(processor, "_recorder_hook", None)
    if hook is not None:
        hook.remove()
        del processor._recorder_hook
