"""What one front end has to tell the others, on their event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from recorder_core.host.relay import Relay

_TELL_TIMEOUT_S = 5.0
_News = TypeVar("_News")


def exchange_news(
    relay: Relay, hear: Callable[[_News], None]
) -> Callable[[_News], Awaitable[None]]:
    """Have what other front ends tell heard on the running event loop.

    Args:
        relay: The front end's.
        hear: Called on the loop with what another front end told.

    Returns:
        Tells the others, and returns when they have heard it, or after five seconds.
    """
    loop = asyncio.get_running_loop()

    async def tell(news: _News) -> None:
        await asyncio.wait([asyncio.wrap_future(relay.announce(news))], timeout=_TELL_TIMEOUT_S)

    def pass_on(news: _News) -> None:
        loop.call_soon_threadsafe(hear, news)

    relay.listen(pass_on)
    return tell
