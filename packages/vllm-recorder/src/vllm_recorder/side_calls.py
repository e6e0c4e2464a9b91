"""Where vLLM samples what is no sample of a client's: beams, scores, echoes.

What the engine is asked for looks the same, and ids and parameters are the client's to choose. So
the code that asks is made to say it: while recording, it runs with a reason in force, which the
hook reads where it sees the request.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

from vllm.sampling_params import SamplingParams

from recorder_core.drops import DropReason
from recorder_core.errors import UnsupportedEngineError
from vllm_recorder import compat

_ENTRYPOINTS = "vllm.entrypoints"
_BEAMS = f"{_ENTRYPOINTS}.generate.beam_search"
_DECISIONS = f"{_ENTRYPOINTS}.generate.structured_decisions.serving"

ECHO = (f"{_ENTRYPOINTS}.openai.completion.protocol", "CompletionRequest", "to_sampling_params")
"""Where `echo` with no tokens asked for becomes one token that is not shown."""

SIDE_CALLS = {
    (f"{_BEAMS}.offline", "BeamSearchOfflineMixin", "beam_search"): DropReason.BEAM_SEARCH,
    (f"{_BEAMS}.online", "BeamSearchOnlineMixin", "beam_search"): DropReason.BEAM_SEARCH,
    (
        f"{_ENTRYPOINTS}.generate.generative_scoring.serving",
        "ServingGenerativeScoring",
        "create_generative_scoring",
    ): DropReason.NO_SAMPLE,
    (
        f"{_ENTRYPOINTS}.speech_to_text.base.serving",
        "SpeechToTextBaseServing",
        "_detect_language",
    ): DropReason.NO_SAMPLE,
    # What closes a session looks like any request.
    (
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "_add_streaming_input_request",
    ): DropReason.STREAMING_INPUT,
}
"""Methods that ask the engine for tokens of which no client is given one as sampled."""

NEWER_SIDE_CALLS = {
    # Since 0.32, since 0.33.
    (_DECISIONS, "ServingStructuredDecisions", "create_decision"): DropReason.NO_SAMPLE,
    (
        f"{_ENTRYPOINTS}.openai.decisions.serving",
        "OpenAIServingDecisions",
        "create_decisions",
    ): DropReason.NO_SAMPLE,
}
"""As `SIDE_CALLS`, in modules that not every supported release has."""

_reason: ContextVar[DropReason | None] = ContextVar("recorder_side_call", default=None)


class Unsampled(SamplingParams):
    """Parameters of a request whose token nobody is shown; copies of them are such too."""


def side_call(params: SamplingParams) -> DropReason | None:
    """Why what is asked of the engine here is no sample; None if it is one."""
    return DropReason.NO_SAMPLE if isinstance(params, Unsampled) else _reason.get()


class SideCalls:
    """Makes vLLM's own calls say what they are, as long as an engine is recorded."""

    def __init__(self) -> None:
        self._users = 0
        self._originals: list[tuple[type, str, Any]] = []

    def watch(self) -> None:
        """One more engine is recorded.

        Raises:
            UnsupportedEngineError: A method is not where it was, or parameters cannot be marked.
        """
        if not self._users:
            _check_marking()
            newer = {each: why for each, why in NEWER_SIDE_CALLS.items() if _is_here(each[0])}
            wrappers: dict[Any, Callable[[Any], Any]] = {
                _find(*place): functools.partial(_saying, reason)
                for place, reason in (SIDE_CALLS | newer).items()
            }
            wrappers[_find(*ECHO)] = _telling_echoes
            # All are found before the first is replaced.
            for (owner, name), wrap in wrappers.items():
                original = vars(owner)[name]
                setattr(owner, name, wrap(original))
                self._originals.append((owner, name, original))
        self._users += 1

    def unwatch(self) -> None:
        """One engine less."""
        self._users -= 1
        if not self._users:
            while self._originals:
                setattr(*self._originals.pop())


side_calls = SideCalls()
"""Of this process: the methods are of classes that all engines in it share."""


def _find(module: str, owner_name: str, name: str) -> tuple[type, str]:
    try:
        owner: type = getattr(importlib.import_module(module), owner_name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedEngineError(
            f"{module}.{owner_name} is missing ({error}): this build of vLLM differs from the "
            "release that vllm-recorder was made for"
        ) from error
    compat.SUPPORT.check_parameters(owner, name, ["self"])
    return owner, name


def _check_marking() -> None:
    params = SamplingParams()
    try:
        params.__class__ = Unsampled
    except TypeError as error:
        raise UnsupportedEngineError(f"vLLM's SamplingParams cannot be marked: {error}") from None
    if not isinstance(params.clone(), Unsampled):
        raise UnsupportedEngineError("a copy of vLLM's SamplingParams is of another class")


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _saying(reason: DropReason, function: Any) -> Any:
    """The method, with a reason in force while it runs."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def items(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            # Between two items the caller's own code runs, perhaps in another context.
            iterator = function(*args, **kwargs)
            try:
                while True:
                    before = _reason.get()
                    _reason.set(reason)
                    try:
                        item = await anext(iterator)
                    except StopAsyncIteration:
                        return
                    finally:
                        _reason.set(before)
                    yield item
            finally:
                await iterator.aclose()

        return items

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            token = _reason.set(reason)
            try:
                return await function(*args, **kwargs)
            finally:
                _reason.reset(token)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        token = _reason.set(reason)
        try:
            return function(*args, **kwargs)
        finally:
            _reason.reset(token)

    return called


def _telling_echoes(to_sampling_params: Any) -> Any:
    @functools.wraps(to_sampling_params)
    def telling(request: Any, *args: Any, **kwargs: Any) -> Any:
        params = to_sampling_params(request, *args, **kwargs)
        if request.echo and request.max_tokens == 0:
            params.__class__ = Unsampled
        return params

    return telling
