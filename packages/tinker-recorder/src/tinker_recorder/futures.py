"""Futures that complete later than the SDK's own: when what they bring is recorded.

The SDK completes a future and then calls its callbacks, so whoever waits for it may be on its way
before a callback has run. What is returned here instead is a second future, completed last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from recorder_core.drops import DropReason

Finish = Callable[[BaseException | None], None]
"""Completes the future: with its result, or with an exception instead."""


def plain(future: Any) -> Future[Any]:
    """The `concurrent.futures` future in what the SDK returned."""
    inner: Future[Any] = future.future() if hasattr(future, "future") else future
    return inner


def chained(
    future: Any,
    succeeded: Callable[[Any, Finish], None],
    failed: Callable[[DropReason], None] = lambda reason: None,
) -> Any:
    """A future of the same type, completed in the same way as `future`, but later.

    Cancelling it cancels `future`. Exceptions and cancellations pass through at once.

    Args:
        future: The SDK's.
        succeeded: Called with the result and what completes the new future; on the SDK's event
            loop, where it must not block.
        failed: Called with `failed` or `cancelled`.
    """
    inner = plain(future)
    outer: Future[Any] = Future()

    def forward_cancel(_: Future[Any]) -> None:
        if outer.cancelled():
            inner.cancel()

    def on_done(_: Future[Any]) -> None:
        if inner.cancelled():
            outer.cancel()
        # From here on it cannot be cancelled, just as a future that is done.
        if not outer.set_running_or_notify_cancel():
            failed(DropReason.CANCELLED)
            return
        error = inner.exception()
        if error is not None:
            outer.set_exception(error)
            failed(DropReason.FAILED)
            return
        result = inner.result()
        succeeded(result, _finisher(outer, result))

    outer.add_done_callback(forward_cancel)
    inner.add_done_callback(on_done)
    return outer if inner is future else type(future)(outer)


def _finisher(outer: Future[Any], result: Any) -> Finish:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None

    def finish(error: BaseException | None) -> None:
        if error is None:
            outer.set_result(result)
        else:
            outer.set_exception(error)

    def finish_on_loop(error: BaseException | None) -> None:
        # The caller's own callbacks run where they always did: on the SDK's event loop.
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(finish, error)
                return
        finish(error)

    return finish_on_loop
