"""One generation in flight: its request, the tokens so far, and the `Turn` that it becomes."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recorder_core.intake import Pending
from recorder_core.records import FinishReason, MultiModalItem, RoutedExperts, Turn
from sglang_recorder import experts
from sglang_recorder.client_request import ClientRequest
from sglang_recorder.sampling import Drawn
from sglang_recorder.weights import Label, LabelsInForce

EXPERTS_MISMATCH = "routed_experts_mismatch"
"""A record's flag: the engine sent routed experts of another number of tokens; none are kept."""


class Generation:
    """What the hook knows of one generation."""

    __slots__ = (
        "adapter",
        "cached_tokens",
        "created_at",
        "experts",
        "flags",
        "identity",
        "ids",
        "index",
        "is_only_decoded",
        "labels",
        "lacks_first_logprob",
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

    def __init__(
        self,
        pending: Pending,
        request: ClientRequest,
        tokenized: Any,
        *,
        drawn: Drawn,
        adapter: str | None,
        label: Label,
    ) -> None:
        self.pending = pending
        self.request_id = request.request_id
        self.index = request.sent
        self.identity = request.identity
        self.prompt_ids: Sequence[int] = tokenized.input_ids
        text = tokenized.input_text
        self.prompt_text = text if isinstance(text, str) and text else None
        self.sampling = drawn.sampling
        self.flags = list(drawn.flags)
        self.multi_modal = _multi_modal(tokenized.mm_inputs)
        self.adapter = adapter
        self.labels = LabelsInForce(label)
        self.created_at = time.time()
        self.ids: list[int] = []
        self.logprob_ids: list[int] = []
        self.logprobs: list[float] = []
        self.is_only_decoded = False
        """Whether another engine filled its prompt's cache and sampled its first token."""
        self.lacks_first_logprob = False
        """Whether that engine was asked for no logprob."""
        self.texts: list[str] = []
        self.cached_tokens: int | None = None
        self.experts: Any = None
        self.start_of_experts = 0

    def extend(self, ids: Sequence[int], text: str | None) -> None:
        """Take new tokens, and the text that they add, if there is a detokenizer."""
        self.ids += ids
        if text is not None:
            self.texts.append(text)

    def extend_logprobs(self, values: Sequence[float] | None, ids: Sequence[int] | None) -> None:
        """Take logprobs, and the tokens that they are of."""
        if values and ids:
            self.logprobs += values
            self.logprob_ids += ids

    def flag(self, flag: str) -> None:
        """Say something about the record, once."""
        if flag not in self.flags:
            self.flags.append(flag)

    def turn(
        self, reason: Mapping[str, Any], spans: Iterable[Any] | None, experts_per_token: int
    ) -> Turn:
        """The finished generation; whatever takes time is left to the recorder's thread."""
        versions, flags = self.labels.spans(spans, len(self.ids))
        routed = self._routed_experts(experts_per_token)
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
            routed_experts=routed,
            sampling=self.sampling,
            adapter=self.adapter,
            multi_modal=self.multi_modal,
            request_id=self.request_id,
            sample_index=self.index,
            attempt=self.identity.attempt,
            cached_tokens=self.cached_tokens,
            created_at=self.created_at,
            finished_at=time.time(),
            flags=(*flags, *self.flags),
            exchange=self.identity.exchange,
        )

    def _routed_experts(self, top_k: int) -> Callable[[], RoutedExperts] | None:
        if self.experts is None:
            return None
        rows = len(self.prompt_ids) + len(self.ids) - 1 - self.start_of_experts
        if not experts.fits(self.experts, rows, top_k):
            self.flag(EXPERTS_MISMATCH)
            return None
        return functools.partial(
            experts.decode,
            self.experts,
            rows,
            top_k,
            start=self.start_of_experts,
            computed_from=len(self.prompt_ids) if self.is_only_decoded else 0,
        )

    def _checked_logprobs(self) -> Sequence[float]:
        values, ids = self.logprobs, self.logprob_ids
        if self.lacks_first_logprob and values:
            values, ids = [math.nan, *values[1:]], [*self.ids[:1], *ids[1:]]
        # Of other tokens than the sampled ones they would be worse than none: the recorder flags
        # unequal lengths and keeps no value.
        return values if ids == list(self.ids) else []


def _finish_reason(reason: Mapping[str, Any]) -> FinishReason:
    kind = reason.get("type")
    if kind == "abort":
        failed = (reason.get("status_code") or 0) >= 500
        return FinishReason.ERROR if failed else FinishReason.ABORT
    return FinishReason.LENGTH if kind == "length" else FinishReason.STOP


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
