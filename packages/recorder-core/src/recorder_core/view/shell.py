"""The page itself: constant bytes without data, so that they are given to whoever asks."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from recorder_core.protocol import PREFIX
from recorder_core.view.static_files import static_files

VIEW = f"{PREFIX}/view"

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# What model text could do if it ever became more than text: nothing.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page(name: str = "index.html") -> Response:
    """The page, or a file that belongs to it."""
    content, kind = static_files().get(name), _TYPES.get(name.rpartition(".")[2])
    if content is None or kind is None:
        return PlainTextResponse(f"the page has no file {name[:100]!r}", 404, dict(HEADERS))
    return Response(content, headers=dict(HEADERS), media_type=kind)


async def show(request: Request) -> Response:
    """The route `/records/view`."""
    return page()


async def show_file(request: Request) -> Response:
    """The route `/records/view/{name}`."""
    return page(request.path_params["name"])


class PageMiddleware:
    """Pure ASGI middleware that gives the page out before an engine asks for its own API key.

    A browser's first request has no key, and the page has no data.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path = scope["path"]
            if path == VIEW:
                await page()(scope, receive, send)
                return
            if path.startswith(f"{VIEW}/"):
                await page(path.removeprefix(f"{VIEW}/"))(scope, receive, send)
                return
        await self.app(scope, receive, send)
