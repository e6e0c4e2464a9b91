"""How a generation is sampled, in the words of a record: from SGLang's parameters.

SGLang takes logprobs from what it samples from, at the request's temperature, after penalties,
biases, grammars and custom processors and before top_k, top_p and min_p. What stands between them
and the policy's own is named in `Sampling` and in a record's flags.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple, TypeVar

import msgspec

from recorder_core.records import BIASED, CONSTRAINED, FORCED_TOKENS, Sampling

ORIGINAL = "original_logprobs"
"""Logprobs that leave the temperature out."""
AT_TEMPERATURE = "temperature_logprobs"
"""Logprobs at the request's temperature."""
_TOP_K_ALL = 1 << 30
"""How SGLang writes a top_k of -1, the whole vocabulary."""
_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""SGLang's parameter → what a record calls it; tools and response formats end up in one."""


_Value = TypeVar("_Value")


class Drawn(NamedTuple):
    """From which distribution a generation's tokens come."""

    sampling: Sampling
    flags: tuple[str, ...]


class Sampler:
    """How one server samples, whatever a request asks for.

    Args:
        server_args: SGLang's `ServerArgs`.
    """

    def __init__(self, server_args: Any) -> None:
        def given(name: str) -> Any:
            return getattr(server_args, name, None)

        self.logprobs_mode = (
            "original_logprobs"
            if _is_on("SGLANG_RETURN_ORIGINAL_LOGPROB")
            else "temperature_logprobs"
        )
        self._strict_thinking = bool(given("enable_strict_thinking"))
        flags = []
        if self._strict_thinking:
            flags.append(CONSTRAINED)
        thresholds = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        marked = given("watermark_default_enabled") or given("watermark_enforce_all")
        # Below 1, drafts are taken that the model would not have sampled.
        if marked or any(given(name) not in (None, 1.0) for name in thresholds):
            flags.append(BIASED)
        if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0:
            flags.append(FORCED_TOKENS)
        self._flags = tuple(flags)

    def draws(self, tokenized: Any) -> Drawn:
        """How a tokenized request is sampled: what it asks for, and the server's defaults."""
        params = tokenized.sampling_params
        processor = getattr(tokenized, "custom_logit_processor", None)
        budget = _thinking_budget(params)
        shaping = _Shaping(
            presence_penalty=_unless(params.presence_penalty, 0.0),
            frequency_penalty=_unless(params.frequency_penalty, 0.0),
            repetition_penalty=None
            if params.repetition_penalty == 1
            else params.repetition_penalty,
            min_tokens=_unless(params.min_new_tokens, 0),
        )
        constraint = next(
            (kind for name, kind in _CONSTRAINTS.items() if getattr(params, name)), None
        )
        sampling = _shared_sampling(
            params.temperature,
            params.top_p,
            -1 if params.top_k == _TOP_K_ALL else params.top_k,
            params.min_p,
            params.sampling_seed,
            self.logprobs_mode,
            shaping,
            constraint,
            budget,
        )
        if params.logit_bias:
            bias = {int(token): float(value) for token, value in params.logit_bias.items()}
            sampling = msgspec.structs.replace(sampling, logit_bias=bias)
        shaped = any(each is not None for each in shaping) or params.logit_bias
        may = {
            CONSTRAINED: constraint,
            BIASED: shaped or processor or getattr(params, "watermark", None),
            # A processor may leave one token only; so does the end of a thinking budget.
            FORCED_TOKENS: processor or (self._strict_thinking and budget is not None),
        }
        return Drawn(sampling, tuple(flag for flag in may if may[flag] or flag in self._flags))


class _Shaping(NamedTuple):
    """What moves probability from one token to another; None where it does not."""

    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    min_tokens: int | None


@functools.lru_cache(maxsize=1024)
def _shared_sampling(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    logprobs_mode: str,
    shaping: _Shaping,
    constraint: str | None,
    thinking_token_budget: int | None,
) -> Sampling:
    # Requests are sampled alike: their records share one object, which is immutable.
    given = {
        **shaping._asdict(),
        "constraint": constraint,
        "thinking_token_budget": thinking_token_budget,
    }
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs_mode=logprobs_mode,
        **{name: value for name, value in given.items() if value is not None},
    )


def _unless(value: _Value, neutral: _Value) -> _Value | None:
    return None if value == neutral else value


def _thinking_budget(params: Any) -> int | None:
    custom = params.custom_params
    budget = custom.get("thinking_budget") if isinstance(custom, dict) else None
    return budget if isinstance(budget, int) and budget >= 0 else None


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")
