"""From which distribution a token came: what a request's parameters make of the model's own."""

from __future__ import annotations

import functools
from typing import Any

from recorder_core.records import BIASED, CONSTRAINED, FORCED_TOKENS, Sampling

# vLLM's defaults of them are false, but for a repetition penalty of 1.
_SHAPING = (
    *["presence_penalty", "frequency_penalty", "repetition_penalty"],
    *["logit_bias", "allowed_token_ids", "bad_words", "min_tokens"],
)
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def flags_of(params: Any, *, watermarks: bool) -> tuple[str, ...]:
    """What a trainer should know of a generation's tokens and logprobs.

    Args:
        params: The `SamplingParams` as the engine has them: what the request left open is filled in
            from the server's defaults and the model's `generation_config.json`.
        watermarks: Whether the engine watermarks what does not opt out.
    """
    flags = []
    if params.structured_outputs is not None:
        flags.append(CONSTRAINED)
    watermarked = watermarks and params.watermarking is not False
    if watermarked or any(_shape(params, name) for name in _SHAPING):
        flags.append(BIASED)
    if params.thinking_token_budget is not None or getattr(params, "trace_decode_token_ids", None):
        flags.append(FORCED_TOKENS)  # the engine does not say which tokens
    return tuple(flags)


def sampling_of(params: Any, logprobs_mode: str) -> Sampling:
    """How a generation is sampled; generations sampled alike share one object.

    Args:
        params: The `SamplingParams` as the engine has them.
        logprobs_mode: The engine's, e.g. `raw_logprobs`.
    """
    fields = [
        ("temperature", params.temperature),
        ("top_p", params.top_p),
        ("top_k", params.top_k),
        ("min_p", params.min_p),
        ("seed", params.seed),
        ("logprobs_mode", logprobs_mode),
        ("constraint", _constraint(params.structured_outputs)),
        ("thinking_token_budget", params.thinking_token_budget),
        *((name, _hashable(value)) for name in _SHAPING if (value := _shape(params, name))),
    ]
    return _sampling(tuple(fields))


@functools.lru_cache(maxsize=1024)
def _sampling(fields: tuple[tuple[str, Any], ...]) -> Sampling:
    values = dict(fields)
    if "logit_bias" in values:
        values["logit_bias"] = {token: float(bias) for token, bias in values["logit_bias"]}
    return Sampling(**values)


def _shape(params: Any, name: str) -> Any:
    value = getattr(params, name)
    return None if name == "repetition_penalty" and value == 1 else value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


def _constraint(structured_outputs: Any) -> str | None:
    for kind in _CONSTRAINTS:
        if structured_outputs is not None and getattr(structured_outputs, kind) is not None:
            return kind
    return None
