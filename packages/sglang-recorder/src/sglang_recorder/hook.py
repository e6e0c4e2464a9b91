"""The only code that touches SGLang's internals: from its messages to a finished `Turn`.

Between the tokenizer manager and the scheduler go messages whose shape outlives the code around
them: a tokenized request on the way out, batches of new tokens on the way back. The hooks read
both. A request that is to be recorded asks the scheduler for logprobs; what the client sees is
decided by the request it sent, which is another object, so no reply changes. Requests that are not
recorded are left exactly as they were.
"""

from __future__ import annotations

import base64
import functools
import os
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import sglang
from sglang.srt.managers.io_struct import (
    AbortReq,
    GenerateReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from recorder_core.context import MISSING, Identity, current_identity
from recorder_core.engines import VersionLabels
from recorder_core.errors import UnsupportedEngineError
from recorder_core.keys import RecordKey
from recorder_core.recorder import Pending, Recorder
from recorder_core.records import (
    FinishReason,
    MultiModalItem,
    RoutedExperts,
    Sampling,
    Turn,
    VersionSpan,
)
from sglang_recorder import compat

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SOURCE = HookSource("recorder", "sglang-recorder")
_HEALTH_CHECK = "HEALTH_CHECK"
_TOP_K_ALL = 1 << 30
"""How SGLang writes a top_k of -1, the whole vocabulary."""

IN_PLACE_UPDATE = "in_place_weight_update"
"""A record's flag: weights were replaced under a generation that kept its old KV cache, so the
tokens after the switch come from neither checkpoint."""
STALE_CACHE = "stale_prefix_cache"
"""A record's flag: the KV cache it may have used was computed by earlier weights."""


class Call:
    """One call of `generate_request`: what its samples have in common."""

    __slots__ = ("identity", "request_id", "sent")

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.request_id = ""
        self.sent = 0


_call: ContextVar[Call | None] = ContextVar("recorder_call", default=None)


class Recording:
    """What the hook knows of one generation: its request, and the tokens so far."""

    __slots__ = (
        "adapter",
        "attempt",
        "cached_tokens",
        "created_at",
        "experts",
        "flags",
        "ids",
        "index",
        "labels",
        "logprob_ids",
        "logprobs",
        "multi_modal",
        "pending",
        "prompt_ids",
        "prompt_text",
        "request_id",
        "sampling",
        "start_of_experts",
        "texts",
    )

    def __init__(self, pending: Pending, call: Call, tokenized: Any, version: str) -> None:
        self.pending = pending
        self.request_id = call.request_id
        self.index = call.sent
        self.attempt = call.identity.attempt
        self.prompt_ids: Sequence[int] = tokenized.input_ids
        text = tokenized.input_text
        self.prompt_text = text if isinstance(text, str) and text else None
        self.sampling = _sampling(tokenized.sampling_params)
        self.adapter: str | None = None
        self.multi_modal = _multi_modal(tokenized.mm_inputs)
        self.labels = VersionLabels(version)
        self.created_at = time.time()
        self.ids: list[int] = []
        self.logprob_ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.cached_tokens: int | None = None
        self.experts: Any = None
        self.start_of_experts = 0
        self.flags: list[str] = []

    def turn(
        self, reason: Mapping[str, Any], spans: Iterable[Any] | None, experts_per_token: int
    ) -> Turn:
        """The finished generation; whatever takes time is left to the recorder's thread."""
        count = len(self.ids)
        if spans is None:
            versions, flags = self.labels.spans(count)
        else:
            versions, flags = _clipped(spans, count), ()
        return Turn(
            key=self.pending.key,
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            finish_reason=_finish_reason(reason),
            logprobs=self._checked_logprobs,
            versions=versions,
            stop_reason=reason.get("matched"),
            prompt_text=self.prompt_text,
            response_text="".join(self.texts) if self.texts else None,
            routed_experts=functools.partial(self._routed_experts, experts_per_token),
            sampling=self.sampling,
            adapter=self.adapter,
            multi_modal=self.multi_modal,
            request_id=self.request_id,
            sample_index=self.index,
            attempt=self.attempt,
            cached_tokens=self.cached_tokens,
            created_at=self.created_at,
            finished_at=time.time(),
            flags=(*flags, *self.flags),
        )

    def _checked_logprobs(self) -> Sequence[float]:
        # Of other tokens than the sampled ones they would be worse than none: the recorder flags
        # unequal lengths and keeps no value.
        return self.logprobs if self.logprob_ids == list(self.ids) else []

    def _routed_experts(self, top_k: int) -> RoutedExperts | None:
        if self.experts is None:
            return None
        rows = len(self.prompt_ids) + len(self.ids) - 1 - self.start_of_experts
        if isinstance(self.experts, str):
            data = np.frombuffer(base64.b64decode(self.experts), dtype=np.int32)
        else:  # without a detokenizer SGLang sends the tensor itself
            data = self.experts.numpy()
        return RoutedExperts(data=data.reshape(rows, -1, top_k), start=self.start_of_experts)


def _clipped(spans: Iterable[Any], count: int) -> tuple[VersionSpan, ...]:
    """SGLang's spans, within the tokens that reached the client."""
    return tuple(
        VersionSpan(each.start, min(each.end, count), each.version)
        for each in spans
        if each.start < min(each.end, count)
    )


def _finish_reason(reason: Mapping[str, Any]) -> FinishReason:
    kind = reason.get("type")
    if kind == "abort":
        failed = (reason.get("status_code") or 0) >= 500
        return FinishReason.ERROR if failed else FinishReason.ABORT
    return FinishReason.LENGTH if kind == "length" else FinishReason.STOP


def _sampling(params: Any) -> Sampling:
    top_k = -1 if params.top_k == _TOP_K_ALL else params.top_k
    return _shared_sampling(
        params.temperature, params.top_p, top_k, params.min_p, params.sampling_seed
    )


@functools.lru_cache(maxsize=1024)
def _shared_sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> Sampling:
    # Requests are sampled alike: their records share one object, which is immutable.
    original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs_mode="original_logprobs" if original else "temperature_logprobs",
    )


def _multi_modal(inputs: Any) -> tuple[MultiModalItem, ...]:
    items = getattr(inputs, "mm_items", None) or ()
    return tuple(
        MultiModalItem(
            modality=getattr(item.modality, "name", str(item.modality)).lower(),
            offset=first,
            length=last - first + 1,
            # Not hashed on this side: an identity of its own, so that it matches no other.
            identity=str(item.hash) if item.hash is not None else f"unhashed-{time.time_ns()}",
        )
        for item in items
        for first, last in item.offsets or ()
    )


def _refusal(tokenized: Any) -> str:
    """Why a request that carries a key cannot be recorded; empty if it can."""
    if tokenized.input_ids is None or tokenized.input_embeds is not None:
        return "prompt_embeds"
    if getattr(tokenized, "positional_embed_overrides", None) is not None:
        return "prompt_embeds"
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        return "beam_search"
    return ""


class Hook:
    """Records the generations of one tokenizer manager.

    Args:
        manager: SGLang's `TokenizerManager`.
        recorder: Where turns go.
        routed_experts: Ask for routed experts, and keep them out of replies that did not ask.
    """

    def __init__(self, manager: Any, recorder: Recorder, *, routed_experts: bool) -> None:
        self.recorder = recorder
        self.active = True
        self.probe: tuple[RecordKey, Recorder] | None = None
        """A key whose generations go to another recorder: that of the check at start."""
        self._manager = manager
        self._routed_experts = routed_experts
        self._reports_spans = compat.reports_spans(compat.SUPPORT.check_version(sglang.__version__))
        config = manager.model_config
        self._top_k = getattr(config.hf_text_config, "num_experts_per_tok", None) or 0
        self._in_flight: dict[str, Recording] = {}
        self._hidden_experts: set[str] = set()
        """Requests whose clients did not ask for the routed experts that they bring."""
        self._version = self._label()
        self._pause_mode = ""
        self._stale_cache = False

    def _label(self) -> str:
        manager = self._manager
        if self._reports_spans:
            return ""  # the scheduler knows better
        return str(manager.server_args.weight_version or "")

    async def set_version(self, version: str) -> None:
        """Tell the engine the label of its weights."""
        manager = self._manager
        if hasattr(manager, "update_weight_version"):
            await manager.update_weight_version(
                UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
            )
        else:
            manager._update_weight_version_if_provided(version)

    # On the way to the scheduler.

    def take(self, tokenized: Any) -> str | None:
        """A request is about to be sent; returns its id if it is recorded."""
        try:
            return self._take(tokenized.rid, tokenized)
        except Exception:  # noqa: BLE001 - the engine comes first: counted, never raised
            self._failed(tokenized.rid)
            return None

    def _take(self, rid: str, tokenized: Any) -> str | None:
        if not self.active or not isinstance(tokenized, TokenizedGenerateReqInput):
            return None
        if rid.startswith(_HEALTH_CHECK) or tokenized.sampling_params.max_new_tokens == 0:
            return None  # a probe; or a prefill for n > 1, or a score: nothing is sampled
        call = _call.get() or Call(current_identity() or MISSING)
        call.request_id = call.request_id or rid
        try:
            return self._start(rid, tokenized, call)
        finally:
            call.sent += 1

    def _start(self, rid: str, tokenized: Any, call: Call) -> str | None:
        key = call.identity.key
        if key is None:
            self.recorder.count_unkeyed(call.identity.reason)
            return None
        recorder = self.probe[1] if self.probe and key == self.probe[0] else self.recorder
        pending = recorder.start(key)
        try:
            refusal = _refusal(tokenized)
            recording = None if refusal else self._recording(pending, call, tokenized)
        except Exception:
            pending.drop("error")
            raise
        if recording is None:
            pending.drop(refusal)
            return None
        self._in_flight[rid] = recording
        return rid

    def _recording(self, pending: Pending, call: Call, tokenized: Any) -> Recording:
        self._notice_label()
        recording = Recording(pending, call, tokenized, self._version)
        state = self._manager.rid_to_state.get(tokenized.rid)
        recording.adapter = getattr(getattr(state, "obj", None), "lora_path", None)
        if not tokenized.return_logprob:
            tokenized.return_logprob = True
            tokenized.logprob_start_len = -1  # of the response only
        recording.start_of_experts = getattr(tokenized, "routed_experts_start_len", 0) or 0
        if self._routed_experts and not tokenized.return_routed_experts:
            tokenized.return_routed_experts = True
            self._hidden_experts.add(tokenized.rid)
        return recording

    def forget(self, rids: Iterable[str], reason: str) -> None:
        """Requests that did not reach the scheduler, or cannot be followed any more."""
        for rid in rids:
            self._hidden_experts.discard(rid)
            recording = self._in_flight.pop(rid, None)
            if recording is not None:
                recording.pending.drop(reason)

    # On the way back.

    def receive(self, batch: Any) -> None:
        """New tokens of many requests; a fault costs one record."""
        if not self._in_flight and not self._hidden_experts:
            return
        experts = self._take_experts(batch)
        self._notice_label()
        for i, rid in enumerate(batch.rids):
            recording = self._in_flight.get(rid)
            if recording is None:
                continue
            try:
                recording.experts = experts[i] if experts else None
                self._append(recording, batch, i)
                if batch.finished_reasons[i] is not None:
                    self._finish(rid, recording, batch, i)
            except Exception:  # noqa: BLE001 - the engine comes first: counted, never raised
                self._failed(rid, recording)

    def _take_experts(self, batch: Any) -> list[Any] | None:
        """The batch's routed experts; what no client asked for is taken out of the batch."""
        shown = getattr(batch, "routed_experts", None)
        if not shown:
            return None
        experts = list(shown)
        for i, rid in enumerate(batch.rids):
            if rid in self._hidden_experts:
                shown[i] = None
                if batch.finished_reasons[i] is not None:
                    self._hidden_experts.discard(rid)
        return experts

    def _append(self, recording: Recording, batch: Any, i: int) -> None:
        recording.ids.extend(batch.output_ids[i])
        if batch.output_token_logprobs_val:
            recording.logprobs.extend(batch.output_token_logprobs_val[i] or ())
            recording.logprob_ids.extend(batch.output_token_logprobs_idx[i] or ())
        texts = getattr(batch, "output_strs", None)
        if texts:
            recording.texts.append(texts[i])

    def _finish(self, rid: str, recording: Recording, batch: Any, i: int) -> None:
        del self._in_flight[rid]
        reason = batch.finished_reasons[i]
        if reason["type"] == "abort" and 400 <= (reason.get("status_code") or 0) < 500:
            # Refused, e.g. for a bad grammar; some releases sample a token all the same.
            recording.pending.drop("rejected")
            return
        if batch.prompt_tokens[i] != len(recording.prompt_ids):
            # A session: the scheduler put what it remembers before the prompt that was sent.
            recording.pending.drop("prompt_unknown")
            return
        recording.cached_tokens = batch.cached_tokens[i]
        if batch.completion_tokens[i] != len(recording.ids):
            recording.flags.append("completion_tokens_mismatch")
        if rid not in self._manager.rid_to_state:
            recording.flags.append("client_disconnected")
        spans = batch.weight_versions[i] if getattr(batch, "weight_versions", None) else None
        self._hand_over(recording, reason, spans)

    def _hand_over(self, recording: Recording, reason: Mapping[str, Any], spans: Any) -> None:
        if self._stale_cache and recording.cached_tokens:
            _add(recording.flags, STALE_CACHE)
        recording.pending.finish(recording.turn(reason, spans, self._top_k))

    def abort(self, message: Any) -> None:
        """A request was aborted while it waited for its turn."""
        self._hidden_experts.discard(message.rid)
        recording = self._in_flight.pop(message.rid, None)
        if recording is None:
            return
        try:
            reason = message.finished_reason or {"type": "abort"}
            self._hand_over(recording, reason, getattr(message, "weight_versions", None))
        except Exception:  # noqa: BLE001 - as in `receive`
            self._failed(message.rid, recording)

    def _failed(self, rid: str, recording: Recording | None = None) -> None:
        self._in_flight.pop(rid, None)
        if recording is not None:
            recording.pending.drop("error")
        self.recorder.count_error("request %s was not recorded", rid)

    # Weights.

    def _notice_label(self) -> None:
        label = self._label()
        if label != self._version:
            self._version = label
            for recording in self._in_flight.values():
                recording.labels.change(label, len(recording.ids))

    def pause(self, mode: str) -> None:
        """Generation is paused, or goes on with the empty mode."""
        self._pause_mode = mode

    def weights_change(self, update: Any) -> None:
        """New weights are about to be put in place."""
        in_place = self._pause_mode == "in_place"
        keeps_cache = in_place or not getattr(update, "flush_cache", True)
        for recording in self._in_flight.values():
            if in_place:
                _add(recording.flags, IN_PLACE_UPDATE)
            elif keeps_cache:
                _add(recording.flags, STALE_CACHE)
        self._stale_cache = keeps_cache

    def cache_flushed(self) -> None:
        """No KV cache of earlier weights is left."""
        self._stale_cache = False


def _add(flags: list[str], flag: str) -> None:
    if flag not in flags:
        flags.append(flag)


class CarriesCall:
    """As SGLang's generator of replies; its first step knows whose call it is."""

    __slots__ = ("_call", "_generator")

    def __init__(self, generator: Any, call: Call) -> None:
        self._generator = generator
        self._call: Call | None = call

    def __aiter__(self) -> CarriesCall:
        """Itself."""
        return self

    def __anext__(self) -> Any:
        """The next reply; every request is sent before the first one."""
        if self._call is None:
            return self._generator.__anext__()
        call, self._call = self._call, None
        return self._first(call)

    async def _first(self, call: Call) -> Any:
        token = _call.set(call)
        try:
            return await self._generator.__anext__()
        finally:
            _call.reset(token)

    def asend(self, value: Any) -> Any:
        """As the generator's."""
        return self.__anext__() if value is None else self._generator.asend(value)

    def athrow(self, *error: Any) -> Any:
        """As the generator's."""
        return self._generator.athrow(*error)

    def aclose(self) -> Any:
        """As the generator's."""
        return self._generator.aclose()


def _hook_of(manager: Any) -> Hook | None:
    hook: Hook | None = getattr(manager, "_recorder_hook", None)
    return hook


def _generate_request(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    generator = original(manager, obj, *args, **kwargs)
    hook = _hook_of(manager)
    if hook is None or not isinstance(obj, GenerateReqInput):
        return generator
    return CarriesCall(generator, Call(current_identity() or MISSING))


def _send_one_request(original: Any, manager: Any, tokenized_obj: Any) -> Any:
    return _send(original, manager, tokenized_obj, [tokenized_obj])


def _send_batch_request(original: Any, manager: Any, tokenized_objs: Any) -> Any:
    return _send(original, manager, tokenized_objs, tokenized_objs)


def _send(original: Any, manager: Any, argument: Any, requests: Sequence[Any]) -> Any:
    hook = _hook_of(manager)
    if hook is None:
        return original(manager, argument)
    rids = [rid for each in requests if (rid := hook.take(each))]
    try:
        # A function in older releases and a coroutine in newer ones: handed on as it is.
        sending = original(manager, argument)
    except BaseException:
        hook.forget(rids, "not_sent")
        raise
    return _sent(sending, hook, rids) if rids and hasattr(sending, "__await__") else sending


async def _sent(sending: Any, hook: Hook, rids: list[str]) -> Any:
    try:
        return await sending
    except BaseException:
        hook.forget(rids, "not_sent")
        raise


def _handle_batch_output(original: Any, manager: Any, recv_obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.receive(recv_obj)
    return original(manager, recv_obj)


def _handle_abort_req(original: Any, manager: Any, recv_obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.abort(recv_obj)
    return original(manager, recv_obj)


def _pause_generation(original: Any, manager: Any, obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.pause(getattr(obj, "mode", ""))
    return original(manager, obj)


def _continue_generation(original: Any, manager: Any, obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.pause("")
    return original(manager, obj)


def _update_weights(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.weights_change(obj)
    return original(manager, obj, *args, **kwargs)


async def _flush_cache(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(manager, *args, **kwargs)
    hook = _hook_of(manager)
    if hook is not None and result.success:
        hook.cache_flushed()
    return result


_HOOKS: dict[str, Callable[..., Any]] = {
    "_send_one_request": _send_one_request,
    "_send_batch_request": _send_batch_request,
    "_handle_batch_output": _handle_batch_output,
    "_handle_abort_req": _handle_abort_req,
    "generate_request": _generate_request,
    "pause_generation": _pause_generation,
    "continue_generation": _continue_generation,
    "flush_cache": _flush_cache,
    "update_weights_from_disk": _update_weights,
    "update_weights_from_distributed": _update_weights,
    "update_weights_from_tensor": _update_weights,
    "update_weights_from_ipc": _update_weights,
}


def apply_hooks(others: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Register the hooks with SGLang's registry, once in this process, and see that they hold.

    Args:
        others: More targets and the hooks that go around them.

    Raises:
        UnsupportedEngineError: A hook point is missing, or was not hooked.
    """
    for name, expected in compat.HOOKS.items():
        compat.SUPPORT.check_parameters(TokenizerManager, name, expected)
    hooks = {f"{_MANAGER}.{name}": hook for name, hook in _HOOKS.items()} | dict(others or {})
    for target, hook in hooks.items():
        if not _is_applied(target, hook):
            HookRegistry.register(target, hook, HookType.AROUND, source=_SOURCE)
    HookRegistry.apply_hooks()
    for target, hook in hooks.items():
        if not _is_applied(target, hook):
            # SGLang itself only logs that.
            raise UnsupportedEngineError(
                f"SGLang did not hook {target}; another plugin may have hooked it before: list "
                "the plugins to load in SGLANG_PLUGINS, `recorder` first"
            )


def _is_applied(target: str, hook: Callable[..., Any]) -> bool:
    """Whether a call of the target goes through the hook."""
    owner, _, name = target.rpartition(".")
    function: Any = getattr(pkgutil.resolve_name(owner), name)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def install(engine: Any, recorder: Recorder | None = None, *, routed_experts: bool = False) -> Hook:
    """Hook an engine; see `sglang_recorder.install`.

    Args:
        engine: An `sgl.Engine` or a `TokenizerManager`.
        recorder: Where turns go; a new one by default.
        routed_experts: Ask for routed experts, and keep them out of replies that did not ask.

    Raises:
        UnsupportedEngineError: The engine cannot be recorded.
    """
    compat.SUPPORT.check_version(sglang.__version__)
    manager = getattr(engine, "tokenizer_manager", engine)
    if not isinstance(manager, TokenizerManager):
        raise UnsupportedEngineError(
            f"{type(engine).__name__} has no tokenizer manager in this process; give install() "
            "an sgl.Engine"
        )
    installed = _hook_of(manager)
    if installed is not None:
        installed.active = True
        return installed
    apply_hooks()
    hook = Hook(manager, recorder or Recorder(), routed_experts=routed_experts)
    manager._recorder_hook = hook
    # A manager made before the hooks were applied holds on to the method as it was.
    handlers = manager._result_dispatcher._mapping
    handlers[AbortReq] = manager._handle_abort_req
    return hook


def uninstall(engine: Any) -> None:
    """Undo `install`: what is in flight is still recorded."""
    hook = _hook_of(getattr(engine, "tokenizer_manager", engine))
    if hook is not None:
        hook.active = False
