"""The only code that touches vLLM's internals: from its output processor to a finished `Turn`.

Every way out of a generation (finished, stopped by a string, aborted, client gone; streamed or
not; each of n samples) ends in `RequestState._new_completion_output` with a finish reason. Requests
that are to be recorded get a `RequestState` of our subclass, which hands the finished state over
there. Requests that are not recorded are left exactly as they were.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import vllm
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState

from recorder_core.context import MISSING, Identity, current_identity, identify
from recorder_core.drops import DropReason
from recorder_core.errors import UnsupportedEngineError
from recorder_core.intake import Intake, Pending
from recorder_core.recorder import Recorder
from recorder_core.records import (
    FinishReason,
    MultiModalItem,
    Turn,
    VersionSpan,
)
from vllm_recorder import compat, experts
from vllm_recorder.column import Chosen, Columns
from vllm_recorder.sampling import flags_of, sampling_of
from vllm_recorder.sampling_masks import SamplingMaskChunks
from vllm_recorder.side_calls import side_call, side_calls
from vllm_recorder.weights import GenerationWeights, Weights

logger = logging.getLogger("vllm.recorder")

_MISSING = float("nan")

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

    columns: Columns
    chosen: Chosen | None
    """Looks the values up in the columns; None: the engine core does not send them so."""
    values: array[float]
    """Those that came as vLLM sends them, where no column has any."""
    recorder: Intake

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        # A fault here would end vLLM's output loop, for every request. What is missing then is
        # flagged by the recorder: the record has fewer logprobs than ids.
        try:
            # [tokens, 1 + top-k]: the sampler puts the sampled token first.
            values = logprobs_lists.logprobs[:, 0]
            if self.chosen is None:
                self.values.fromlist(values.tolist())
            else:
                self.columns.came_alone(self.chosen, values)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("a logprob could not be read")

    def of_response(self, count: int) -> array[float] | Callable[[], array[float]]:
        """Those of a response of so many tokens, or what looks them up."""
        if self.chosen is None:
            return self.values
        return functools.partial(self.columns.logprobs_of, self.chosen, count)


class RecordedRequest(RequestState):
    """A request whose generation is recorded."""

    recording: Recording

    def _new_completion_output(
        self,
        token_ids: list[int],
        finish_reason: EngineFinishReason | None,
        stop_reason: int | str | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's; with a finish reason, the finished state is handed to the recorder.

        Made once for a whole reply, and for each piece of one that is streamed.
        """
        if finish_reason is not None:
            self.recording.finish(self, finish_reason, stop_reason)
        return super()._new_completion_output(
            token_ids, finish_reason, stop_reason, *args, **kwargs
        )


class UnrecordedRequest(RequestState):
    """A request that is not recorded, of an engine that returns routed experts for us alone."""

    def _new_completion_output(
        self,
        token_ids: list[int],
        finish_reason: EngineFinishReason | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's; the reply shows no routed experts."""
        if finish_reason is not None:
            self.routed_experts_chunks: list[Any] = []
        return super()._new_completion_output(token_ids, finish_reason, *args, **kwargs)


class Recording:
    """What the hook knows of one generation beyond vLLM's own state."""

    __slots__ = (
        *("_arrived", "_hook", "_identity", "_multi_modal", "_params", "_pending"),
        *("sampling_masks", "weights"),
    )

    def __init__(self, hook: Hook, pending: Pending, request: Any, identity: Identity) -> None:
        self._hook = hook
        self._pending = pending
        self._params = request.sampling_params
        self._identity = identity
        self._arrived = request.arrival_time
        # Read here: the features hold images, which must not live as long as the generation.
        self._multi_modal = _multi_modal(request.mm_features)
        self.weights = hook.weights.of_generation(request.lora_request)
        self.sampling_masks: SamplingMaskChunks | None = None
        """None: the engine returns none."""

    def finish(
        self, state: RecordedRequest, finish_reason: EngineFinishReason, stop_reason: Any
    ) -> None:
        """The generation is over; a fault here costs its record, never the reply."""
        try:
            self._pending.finish(self._turn(state, finish_reason, stop_reason))
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self._pending.drop(DropReason.ERROR)
            self._hook.recorder.count_error("request %s was not recorded", state.external_req_id)

    def _turn(
        self, state: RecordedRequest, finish_reason: EngineFinishReason, stop_reason: Any
    ) -> Turn:
        detokenizer = state.detokenizer
        response_ids = detokenizer.output_token_ids
        versions, version_flags = self._versions(state, len(response_ids))
        reason = str(finish_reason)
        known = (*version_flags, reason) if reason == "repetition" else version_flags
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
            routed_experts=self._routed(state, len(response_ids), finish_reason),
            sampling_mask=self._masks(len(response_ids)),
            sampling=functools.partial(sampling_of, self._params, self._hook.logprobs_mode),
            adapter=state.lora_name,
            multi_modal=self._multi_modal,
            request_id=state.external_req_id,
            sample_index=state.request_index,
            attempt=self._identity.attempt,
            cached_tokens=state.num_cached_tokens,
            created_at=self._arrived,
            finished_at=time.time(),
            flags=functools.partial(self._flags, known),
            exchange=self._identity.exchange,
        )

    def _flags(self, known: tuple[str, ...]) -> tuple[str, ...]:
        return flags_of(self._params, watermarks=self._hook.watermarks) + known

    def _versions(
        self, state: RecordedRequest, count: int
    ) -> tuple[Sequence[VersionSpan], tuple[str, ...]]:
        if not self._hook.engine_reports_spans:
            return self.weights.spans(count, None)
        spans = state._weight_version_spans() or ()
        reported = [VersionSpan(each.start, each.end, each.version) for each in spans]
        return self.weights.spans(count, reported)

    def _routed(self, state: RecordedRequest, count: int, finish_reason: EngineFinishReason) -> Any:
        chunks = state.routed_experts_chunks
        if not chunks:
            return None
        if self._hook.hide_routed_experts:
            state.routed_experts_chunks = []
        start = getattr(self._params, "routed_experts_prompt_start", 0) or 0
        rows = state.prompt_len + count - 1 - start
        ended = finish_reason not in (EngineFinishReason.ABORT, EngineFinishReason.ERROR)
        return lambda: experts.join(chunks, start=start, rows=rows, ended=ended)

    def _masks(self, count: int) -> Any:
        masks = self.sampling_masks
        return None if masks is None else functools.partial(masks.joined, count)


def _logprobs_of(processor: Any, response_ids: Sequence[int]) -> Any:
    if isinstance(processor, ChosenLogprobs):
        return processor.of_response(len(response_ids))
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
    if not features:
        return ()
    return tuple(
        MultiModalItem(
            modality=each.modality,
            offset=each.mm_position.offset,
            length=each.mm_position.length,
            identity=str(each.identifier),
        )
        for each in features
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
        self, engine: Any, recorder: Intake, *, version: str, hide_routed_experts: bool
    ) -> None:
        side_calls.watch()  # first: it may refuse
        self.recorder = recorder
        self.hide_routed_experts = hide_routed_experts
        self.engine_reports_spans = hasattr(RequestState, "_weight_version_spans")
        self.columns = Columns.of(engine, recorder)
        self._processor = engine.output_processor
        self._add_request = self._processor.add_request
        # Since 0.30.
        self.watermarks = getattr(engine.vllm_config, "watermark_config", None) is not None
        # Since 0.28.
        self._returns_sampling_masks = getattr(
            engine.vllm_config.model_config, "return_sampling_mask", False
        )
        self._transfers = engine.vllm_config.kv_transfer_config is not None
        self.logprobs_mode = str(engine.vllm_config.model_config.logprobs_mode)
        self.weights = Weights(engine, version, self._live, recorder.count_error)
        self._abort_requests = self._processor.abort_requests
        self._propagate_error = self._processor.propagate_error
        self._patches: dict[str, Any] = {"add_request": self.add_request}
        if isinstance(engine, LLMEngine):
            self._patches["abort_requests"] = self.abort_requests
        else:
            self._patches["propagate_error"] = self.propagate_error
        for name, patch in self._patches.items():
            setattr(self._processor, name, patch)

    def remove(self) -> None:
        """Later requests are not recorded."""
        for name in self._patches:
            delattr(self._processor, name)
        side_calls.unwatch()
        self.weights.remove()

    def _live(self) -> Iterator[tuple[str | None, GenerationWeights, int]]:
        for state in list(self._processor.request_states.values()):
            if isinstance(state, RecordedRequest) and state.detokenizer is not None:
                yield (
                    state.lora_name,
                    state.recording.weights,
                    state.detokenizer.num_output_tokens(),
                )

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As the output processor's; then takes the request's state over."""
        # More input of a session, or its end: what it is was decided when it began.
        known = request.request_id in self._processor.request_states
        result = self._add_request(request, *args, **kwargs)
        if known:
            return result
        try:
            self._attach(request)
        except Exception:  # noqa: BLE001 - the engine comes first: counted and logged, never raised
            self.recorder.count_error("request %s is not recorded", request.request_id)
        return result

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """As the output processor's, which makes no last output in an `LLMEngine`."""
        states = dict(self._processor.request_states)
        aborted: list[str] = self._abort_requests(request_ids, internal)
        self._end((states[each] for each in aborted if each in states), EngineFinishReason.ABORT)
        return aborted

    def propagate_error(self, error: Exception) -> None:
        """As the output processor's; generations in flight end here, without a last output."""
        self._propagate_error(error)
        self._end(self._processor.request_states.values(), EngineFinishReason.ERROR)

    def _end(self, states: Iterable[RequestState], reason: EngineFinishReason) -> None:
        for state in states:
            if isinstance(state, RecordedRequest):
                state.recording.finish(state, reason, None)

    def _attach(self, request: Any) -> None:
        params = request.sampling_params
        if params is None:
            return  # pooling: nothing is generated
        state = self._processor.request_states[request.request_id]
        if self.hide_routed_experts:
            state.__class__ = UnrecordedRequest  # unless it turns out below to be recorded
        identity = current_identity()
        if identity is None:
            identity = _identity_of(params)
        if identity.key is None:
            self.recorder.count_unkeyed(identity.reason, identity.detail)
            return
        pending = self.recorder.start(identity.key)
        refusal = self._refusal(request)
        if refusal is not None:
            pending.drop(refusal)
            return
        try:
            self._take_over(request, state, Recording(self, pending, request, identity))
        except Exception:
            pending.drop(DropReason.ERROR)
            raise

    def _refusal(self, request: Any) -> DropReason | None:
        """Why a request that carries a key is not recorded; None if it is."""
        if request.resumable:
            return DropReason.STREAMING_INPUT
        if request.prompt_token_ids is None:
            return DropReason.PROMPT_EMBEDS
        if self._prefills(request.sampling_params):
            return DropReason.PREFILL
        return side_call(request.sampling_params)

    def _prefills(self, params: Any) -> bool:
        """Whether another engine decodes: the token sampled here is not shown then."""
        if not self._transfers:
            return False
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        return isinstance(transfer, dict) and bool(transfer.get("do_remote_decode"))

    def _take_over(self, request: Any, state: Any, recording: Recording) -> None:
        state.recording = recording
        state.__class__ = RecordedRequest
        if self._returns_sampling_masks:
            recording.sampling_masks = state.sampling_mask_chunks = SamplingMaskChunks(
                self.recorder
            )
        if request.sampling_params.num_logprobs is None:
            # 0 asks the engine for the sampled token's logprob only. On a copy: the state was made
            # from the client's own parameters, and so its reply is.
            params = copy(request.sampling_params)
            params.logprobs = 0
            processor = state.logprobs_processor
            processor.columns, processor.chosen = self.columns, self.columns.mark(params)
            if processor.chosen is None:
                processor.values = array("f")
            processor.recorder = self.recorder
            processor.__class__ = ChosenLogprobs
            # Last, as vLLM's own processor takes logprobs that were not asked for as a fault of
            # the engine.
            request.sampling_params = params


def _identity_of(params: Any) -> Identity:
    extra = params.extra_args
    return identify(str(extra["record_key"])) if extra and "record_key" in extra else MISSING


def install(
    engine: Any,
    recorder: Intake | None = None,
    *,
    version: str | None = None,
    hide_routed_experts: bool = False,
) -> Hook:
    """Hook an engine; see `vllm_recorder.install`.

    Args:
        engine: An `LLM`, `LLMEngine` or `AsyncLLM`.
        recorder: Where turns go; a new one by default.
        version: The label of the engine's weights now; asked of the engine where it answers
            without an event loop.
        hide_routed_experts: Keep routed experts out of the engine's own replies.

    Returns:
        The hook, or the one that is there already.

    Raises:
        UnsupportedEngineError: The engine cannot be recorded.
    """
    compat.share_the_log()
    compat.SUPPORT.check_version(vllm.__version__)
    engine = getattr(engine, "llm_engine", engine)
    processor = getattr(engine, "output_processor", None)
    if processor is None:
        raise UnsupportedEngineError(
            f"{type(engine).__name__} has no output processor in this process; give install() "
            "an LLM, LLMEngine or AsyncLLM"
        )
    installed: Hook | None = getattr(processor, "_recorder_hook", None)
    if installed is not None:
        return installed
    compat.check_hook_points(processor)
    compat.check_config(engine.vllm_config)
    if version is None:
        get_version = engine.get_weight_version
        version = "" if inspect.iscoroutinefunction(get_version) else get_version()
    hook = Hook(
        engine, recorder or Recorder(), version=version, hide_routed_experts=hide_routed_experts
    )
    processor._recorder_hook = hook
    mode = hook.logprobs_mode
    logger.info("Recorded logprobs (%s) are %s", mode, compat.LOGPROBS[mode])
    return hook


def uninstall(engine: Any) -> None:
    """Undo `install`."""
    processor = getattr(engine, "llm_engine", engine).output_processor
    hook: Hook | None = getattr(processor, "_recorder_hook", None)
    if hook is not None:
        hook.remove()
        del processor._recorder_hook
