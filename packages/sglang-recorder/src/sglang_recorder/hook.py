"""Records what one tokenizer manager generates: from SGLang's messages to a finished `Turn`.

Between the tokenizer manager and the scheduler go messages whose shape outlives the code around
them: a tokenized request on the way out, batches of new tokens on the way back. The hooks read
both. A request that is to be recorded asks the scheduler for logprobs; what the client sees is
decided by the request it sent, which is another object, so no reply changes. Requests that are not
recorded are left exactly as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, UpdateWeightVersionReqInput

from recorder_core.drops import DropReason
from recorder_core.intake import Intake, Pending
from recorder_core.keys import RecordKey
from recorder_core.recorder import Recorder
from sglang_recorder.client_request import ClientRequest, current_request
from sglang_recorder.generation import Generation
from sglang_recorder.news import Changed, Changing, News, Paused
from sglang_recorder.sampling import Sampler
from sglang_recorder.weights import STALE_CACHE, Weights


def _refusal(tokenized: Any) -> DropReason | None:
    """Why the sample that a keyed request asks for cannot be recorded; None if it can."""
    if tokenized.input_ids is None or tokenized.input_embeds is not None:
        return DropReason.PROMPT_EMBEDS
    if getattr(tokenized, "positional_embed_overrides", None) is not None:
        return DropReason.PROMPT_EMBEDS
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        return DropReason.BEAM_SEARCH
    return None


class Hook:
    """Records the generations of one tokenizer manager.

    Args:
        manager: SGLang's `TokenizerManager`.
        recorder: Where turns go.
        routed_experts: Ask for routed experts, and keep them out of replies that did not ask.
    """

    def __init__(self, manager: Any, recorder: Intake, *, routed_experts: bool) -> None:
        self.recorder = recorder
        self.active = True
        self.probe: tuple[RecordKey, Recorder] | None = None
        """A key whose generations go to another recorder: that of the check at start."""
        self.tell: Callable[[News], Awaitable[None]] | None = None
        """Tells the engine's other tokenizer workers, and returns when they have heard it."""
        self.weights = Weights(manager)
        self.sampler = Sampler(manager.server_args)
        self._manager = manager
        self._routed_experts = routed_experts
        self._decodes_only = manager.server_args.disaggregation_mode == "decode"
        config = manager.model_config
        self._top_k = getattr(config.hf_text_config, "num_experts_per_tok", None) or 0
        self._in_flight: dict[str, Generation] = {}
        self._hidden_experts: set[str] = set()
        """Requests whose clients did not ask for the routed experts that they bring."""

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
        request = current_request()
        if tokenized.sampling_params.max_new_tokens == 0 or request.shows_no_token:
            self._count_no_sample(request)
            return None
        request.request_id = request.request_id or rid
        try:
            return self._start(rid, tokenized, request)
        finally:
            request.sent += 1

    def _count_no_sample(self, request: ClientRequest) -> None:
        key = request.identity.key
        if key is not None and not request.is_own_prefill():
            self._recorder_of(key).start(key).drop(DropReason.NO_SAMPLE)

    def _start(self, rid: str, tokenized: Any, request: ClientRequest) -> str | None:
        key = request.identity.key
        if key is None:
            self.recorder.count_unkeyed(request.identity.reason)
            return None
        pending = self._recorder_of(key).start(key)
        try:
            refusal = _refusal(tokenized)
            if refusal:
                pending.drop(refusal)
                return None
            self._in_flight[rid] = self._generation(pending, request, tokenized)
        except Exception:
            pending.drop(DropReason.ERROR)
            raise
        if rid.startswith(HEALTH_CHECK_RID_PREFIX):
            # Whoever chose such an id: a busy scheduler passes it over, and never says so. Once the
            # client has gone, what is still in flight is lost.
            weakref.finalize(request, self._in_flight.pop, rid, None)
        return rid

    def _recorder_of(self, key: RecordKey) -> Intake:
        return self.probe[1] if self.probe and key == self.probe[0] else self.recorder

    def _generation(self, pending: Pending, request: ClientRequest, tokenized: Any) -> Generation:
        self._stamp_if_relabelled()
        state = self._manager.rid_to_state.get(tokenized.rid)
        adapter = getattr(getattr(state, "obj", None), "lora_path", None)
        generation = Generation(
            pending,
            request,
            tokenized,
            drawn=self.sampler.draws(tokenized),
            adapter=adapter,
            label=self.weights.label(adapter),
        )
        generation.is_only_decoded = self._decodes_only
        if not tokenized.return_logprob:
            tokenized.return_logprob = True
            tokenized.logprob_start_len = -1  # of the response only
            generation.lacks_first_logprob = self._decodes_only
        generation.start_of_experts = getattr(tokenized, "routed_experts_start_len", 0) or 0
        if self._routed_experts and not tokenized.return_routed_experts:
            tokenized.return_routed_experts = True
            self._hidden_experts.add(tokenized.rid)
        return generation

    def forget(self, rids: Iterable[str], reason: DropReason) -> None:
        """Requests that did not reach the scheduler, or cannot be followed any more."""
        for rid in rids:
            self._hidden_experts.discard(rid)
            generation = self._in_flight.pop(rid, None)
            if generation is not None:
                generation.pending.drop(reason)

    # On the way back.

    def receive(self, batch: Any) -> None:
        """New tokens of many requests; a fault costs one record."""
        if not self._in_flight and not self._hidden_experts:
            return
        experts = self._take_experts(batch)
        if not self.weights.are_reported:
            self._stamp_if_relabelled()
        # What is looked up once for all is not looked up for each token.
        in_flight = self._in_flight
        ids, texts = batch.output_ids, getattr(batch, "output_strs", None)
        logprobs, logprob_ids = batch.output_token_logprobs_val, batch.output_token_logprobs_idx
        finished = batch.finished_reasons
        for i, rid in enumerate(batch.rids):
            generation = in_flight.get(rid)
            if generation is None:
                continue
            try:
                generation.extend(ids[i], texts[i] if texts else None)
                if logprobs:
                    generation.extend_logprobs(logprobs[i], logprob_ids[i])
                if finished[i] is not None:
                    generation.experts = experts[i] if experts else None
                    self._finish(rid, generation, batch, i)
            except Exception:  # noqa: BLE001 - the engine comes first: counted, never raised
                self._failed(rid, generation)

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

    def _finish(self, rid: str, generation: Generation, batch: Any, i: int) -> None:
        del self._in_flight[rid]
        reason = batch.finished_reasons[i]
        if reason["type"] == "abort" and 400 <= (reason.get("status_code") or 0) < 500:
            # Refused, e.g. for a bad grammar; some releases sample a token all the same.
            generation.pending.drop(DropReason.REJECTED)
            return
        if batch.prompt_tokens[i] != len(generation.prompt_ids):
            # A session: the scheduler put what it remembers before the prompt that was sent.
            generation.pending.drop(DropReason.PROMPT_UNKNOWN)
            return
        generation.cached_tokens = batch.cached_tokens[i]
        if batch.completion_tokens[i] != len(generation.ids):
            generation.flags.append("completion_tokens_mismatch")
        if rid not in self._manager.rid_to_state:
            generation.flags.append("client_disconnected")
        spans = batch.weight_versions[i] if getattr(batch, "weight_versions", None) else None
        self._hand_over(generation, reason, spans)

    def _hand_over(self, generation: Generation, reason: Mapping[str, Any], spans: Any) -> None:
        if self.weights.cache_is_stale and generation.cached_tokens:
            generation.flag(STALE_CACHE)
        if self.weights.are_reported:
            spans = spans or ()
        generation.pending.finish(generation.turn(reason, spans, self._top_k))

    def abort(self, message: Any) -> None:
        """A request was aborted while it waited for its turn."""
        self._hidden_experts.discard(message.rid)
        generation = self._in_flight.pop(message.rid, None)
        if generation is None:
            return
        try:
            reason = message.finished_reason or {"type": "abort"}
            self._hand_over(generation, reason, getattr(message, "weight_versions", None))
        except Exception:  # noqa: BLE001 - as in `receive`
            self._failed(message.rid, generation)

    def _failed(self, rid: str, generation: Generation | None = None) -> None:
        self._in_flight.pop(rid, None)
        if generation is not None:
            generation.pending.drop(DropReason.ERROR)
        self.recorder.count_error("request %s was not recorded", rid)

    # Weights.

    def _stamp_if_relabelled(self) -> None:
        if self.weights.are_relabelled():
            self._stamp()

    def _stamp(self) -> None:
        """Tell the generations in flight what the weights are called from here on."""
        for generation in self._in_flight.values():
            label = self.weights.label(generation.adapter)
            generation.labels.change(label, len(generation.ids))

    async def set_version(self, version: str) -> None:
        """Tell the engine the label of its weights."""
        manager = self._manager
        if hasattr(manager, "update_weight_version"):  # which is hooked
            await manager.update_weight_version(
                UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
            )
        else:
            manager._update_weight_version_if_provided(version)
            await self.befall(Changed(version))

    async def befall(self, news: News) -> None:
        """Something befalls the engine's weights: it is noted here and wherever it is served."""
        self.hear(news)
        try:
            if self.tell is not None:
                await self.tell(news)
        except Exception:  # noqa: BLE001 - the engine comes first: counted, never raised
            self.recorder.count_error("other tokenizer workers were not told of %s", news)

    def hear(self, news: News) -> None:
        """Note what befalls the engine's weights, here or by way of another tokenizer worker."""
        try:
            self._note(news)
        except Exception:  # noqa: BLE001 - as in `befall`
            self.recorder.count_error("a change of weights may have gone unnoticed: %s", news)

    def _note(self, news: News) -> None:
        if isinstance(news, Paused):
            self.weights.pause(news.mode)
        elif isinstance(news, Changing):
            flag = self.weights.about_to_change(flushes_cache=news.flushes_cache)
            if flag:
                for generation in self._in_flight.values():
                    generation.flag(flag)
        elif isinstance(news, Changed):
            if news.label is None:
                self.weights.changed(news.adapter)
            else:
                self.weights.told(news.label)
            self._stamp()
        else:
            self.weights.cache_flushed()
