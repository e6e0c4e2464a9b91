"""Which weights sample: the engine's labels, and changes that it is told no label for."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from recorder_core.engines.labels import VersionLabels
from recorder_core.records import VersionSpan

WEIGHTS_CHANGED = "weights_changed"
"""A record's flag: its weights were replaced, and no label was set since; tokens from there on have
no version."""

# Names of workers' methods, vLLM's own and those of trainers' extensions.
_REPLACES = re.compile(
    r"(re)?(load|set|update|finish|receive|recv|sync|swap|copy|pull|broadcast)_"
    r"(?!.*version).*(weight|param|model)"
)


class News(NamedTuple):
    """What one front end of an engine has to tell the others."""

    replaced: tuple[str | None, ...] = ()
    """Adapters whose weights are replaced; None: the model's own."""
    label: str | None = None
    """The weights' label from now on."""


class GenerationWeights:
    """The weights of one generation.

    Args:
        label: The label when it began; empty if it is not known.
        changed: Whether weights were replaced since that label was set.
    """

    __slots__ = ("_changes", "_labels")

    def __init__(self, label: str, changed: bool) -> None:
        self._labels = VersionLabels("" if changed else label)
        # [from, to) in output tokens: weights without a label; to is None until there is one.
        self._changes: list[tuple[int, int | None]] = [(0, None)] if changed else []

    def relabel(self, label: str, position: int) -> None:
        """Another label is in force from the output token `position` on."""
        self._labels.change(label, position)
        if self._changes and self._changes[-1][1] is None:
            start, _ = self._changes.pop()
            if start < position:
                self._changes.append((start, position))

    def change(self, position: int) -> None:
        """Weights without a label are in force from the output token `position` on."""
        if not self._changes or self._changes[-1][1] is not None:
            self._labels.change("", position)
            self._changes.append((position, None))

    def spans(
        self, count: int, reported: Sequence[VersionSpan] | None
    ) -> tuple[Sequence[VersionSpan], tuple[str, ...]]:
        """The spans over `count` output tokens, and flags.

        Args:
            count: Output tokens.
            reported: The engine's own spans, where it has such.
        """
        # Most generations see no change.
        starts = [start for start, _ in self._changes if start < count] if self._changes else []
        flags = (WEIGHTS_CHANGED,) if starts else ()
        if reported is None:
            found, approximate = self._labels.spans(count)
            return found, approximate + flags
        if not starts:
            return reported, flags
        return [each for span in reported if (each := _before(span, starts))], flags


def _before(span: VersionSpan, changes: Iterable[int]) -> VersionSpan | None:
    """The part of a span before weights were replaced under its label."""
    end = min((at for at in changes if span.start <= at < span.end), default=span.end)
    return span._replace(end=end) if span.start < end else None


class Weights:
    """The label of an engine's weights, and whether they still are those that it named.

    Args:
        engine: An `AsyncLLM` or `LLMEngine`.
        label: The label now; empty if it is not known.
        live: The generations in flight: of each its adapter, its weights and its output tokens.
        count_error: Logs and counts an exception that is being handled.
    """

    def __init__(
        self,
        engine: Any,
        label: str,
        live: Callable[[], Iterable[tuple[str | None, GenerationWeights, int]]],
        count_error: Callable[..., None],
    ) -> None:
        self._engine = engine
        self._label = label
        self._live = live
        self._count_error = count_error
        self._changed: set[str | None] = set()  # adapters; None: the model's own weights
        self._adapters: dict[str, Any] = {}
        self.tell: Callable[[News], Awaitable[None]] | None = None
        """Tells the engine's other front ends, and returns when they have heard it."""
        # AsyncLLM's are coroutines, LLMEngine's functions.
        self._is_async = hasattr(engine, "update_weight_version")
        relabel = "update_weight_version" if self._is_async else "set_weight_version"
        self._relabel_engine = getattr(engine, relabel)
        self._patches = {relabel: self._relabel_async if self._is_async else self._relabel}
        for name, replaced in (
            ("collective_rpc", _replaced_by_call),
            ("add_lora", self._replaced_by_adapter),
            ("sleep", _replaced_by_sleep),
        ):
            self._patches[name] = self._noticing(getattr(engine, name), replaced)
        for name, patch in self._patches.items():
            setattr(engine, name, patch)

    def remove(self) -> None:
        """Leave the engine as it was."""
        for name in self._patches:
            delattr(self._engine, name)

    def of_generation(self, adapter: Any) -> GenerationWeights:
        """The weights of a generation that begins.

        Args:
            adapter: Its `LoRARequest`, if it has one.
        """
        if adapter is None:
            return GenerationWeights(self._label, None in self._changed)
        if replaced := self._replaced_by_adapter(adapter):
            self._replace(replaced)
        return GenerationWeights(
            self._label, not self._changed.isdisjoint((None, adapter.lora_name))
        )

    def _replaced_by_adapter(self, lora_request: Any) -> tuple[str | None, ...]:
        """An adapter is loaded or used: is it another under a known name, or one read anew?"""
        name = lora_request.lora_name
        known = self._adapters.get(name)
        if known is lora_request:
            return ()
        self._adapters[name] = lora_request
        other = known is not None and (
            (known.lora_int_id, known.lora_path)
            != (lora_request.lora_int_id, lora_request.lora_path)
        )
        return (name,) if other or lora_request.load_inplace else ()

    def _replace(self, adapters: Iterable[str | None]) -> None:
        self._changed.update(adapters)
        for adapter, weights, position in self._live():
            if None in adapters or adapter in adapters:
                weights.change(position)

    def _labelled(self, label: str) -> None:
        self._label = label
        self._changed.clear()
        for _, weights, position in self._live():
            weights.relabel(label, position)

    def hear(self, news: News) -> None:
        """Another front end of the engine changed its weights, or their label."""
        if news.replaced:
            self._safely(self._replace, news.replaced)
        if news.label is not None:
            self._safely(self._labelled, news.label)

    async def _tell(self, news: News) -> None:
        try:
            if self.tell is not None:
                await self.tell(news)
        except Exception:  # noqa: BLE001 - the engine comes first
            self._count_error("other front ends were not told of %s", news)

    async def _relabel_async(self, new_version: str) -> None:
        await self._relabel_engine(new_version)
        self._safely(self._labelled, new_version)
        await self._tell(News(label=new_version))

    def _relabel(self, weight_version: str) -> None:
        self._relabel_engine(weight_version)
        self._safely(self._labelled, weight_version)

    def _safely(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The engine comes first: a fault here is counted, never raised."""
        try:
            return action(*args, **kwargs)
        except Exception:  # noqa: BLE001 - see above
            self._count_error("a change of weights may have gone unnoticed")

    def _noticing(self, call: Any, replaced: Callable[..., tuple[str | None, ...]]) -> Any:
        # What is sampled before the call returns is of the old weights: the engine core works on
        # one thing at a time. A generation that begins meanwhile is of the new ones.
        @contextmanager
        def noticing(*args: Any, **kwargs: Any) -> Iterator[tuple[str | None, ...]]:
            adapters = self._safely(replaced, *args, **kwargs) or ()
            self._changed.update(adapters)
            try:
                yield adapters
            finally:
                if adapters:
                    self._safely(self._replace, adapters)

        @functools.wraps(call)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with noticing(*args, **kwargs) as adapters:
                if adapters:
                    # Before: elsewhere nothing is to pass as sampled by the weights of before.
                    await self._tell(News(replaced=adapters))
                return await call(*args, **kwargs)

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            with noticing(*args, **kwargs):
                return call(*args, **kwargs)

        return awaited if self._is_async else called


def _replaced_by_call(method: Any, *args: Any, **kwargs: Any) -> tuple[str | None, ...]:
    return (None,) if isinstance(method, str) and _REPLACES.match(method) else ()


def _replaced_by_sleep(level: int = 1, *args: Any, **kwargs: Any) -> tuple[str | None, ...]:
    return (None,) if level > 1 else ()  # from then on the weights are thrown away
