"""Who may use `/records`: the holder of the admin key, or, without one, programs on this machine.

Without a key nothing but the connection says who asks, so whatever could stand between is refused:
a proxy, whose word servers may take for the peer's address, and a browser, which sends requests
for any page that it shows, to any name that resolves to this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from recorder_core.protocol import PREFIX

# What proxies and tunnels add, beside all that is named `…forwarded…`.
_RELAYED = {"via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"}
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9.-]+))(?::[0-9]{1,5})?")
_SHOWN = 100
"""Characters of a header that an error repeats."""


class AdminGuard:
    """Checks a request to `/records`.

    Args:
        admin_key: The bearer token that is asked for; None lets programs on this machine in.
    """

    def __init__(self, admin_key: str | None) -> None:
        if admin_key is not None and not admin_key.strip():
            raise ValueError("the admin key is empty; leave it out to allow this machine only")
        self._admin_key = admin_key.strip().encode() if admin_key is not None else None

    @property
    def audience(self) -> str:
        """Whom `/records` answers, as the end of a sentence that begins with it."""
        if self._admin_key is not None:
            return "wants the admin key"
        return "answers programs on this machine only, as no admin key is set"

    def __call__(self, request: Request) -> None:
        """Let the request pass.

        Raises:
            HTTPException: 401 for a missing or wrong key; without one, 403 for whoever may not be
                a program on this machine; 400 for more than one `Authorization` header.
        """
        given = request.headers.getlist("authorization")
        if len(given) > 1:
            # Of two, the engine and we might believe different ones.
            raise HTTPException(400, f"{len(given)} Authorization headers were sent; send one")
        if self._admin_key is None:
            self.check_sender(request)
            return
        scheme, _, token = "".join(given).partition(" ")
        # Header bytes are read as Latin-1: this gives back the bytes that were sent.
        key = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not hmac.compare_digest(key, self._admin_key):
            raise HTTPException(
                401,
                "/records wants the recording admin key as its bearer token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_sender(self, request: Request) -> None:
        """Where no key is asked for, let pass what a program on this machine sends.

        Raises:
            HTTPException: 403 for anything else, with the way out.
        """
        stranger = self._admin_key is None and _stranger(request)
        if stranger:
            raise HTTPException(
                403,
                f"/records {self.audience}; {stranger}. To use it otherwise, start "
                "the server with --recording-admin-key and send that key.",
            )


class PreflightGuard:
    """Pure ASGI middleware: what a browser asks before it sends another site's request.

    Goes around the engine's own CORS middleware, which would answer it for every site alike. A
    request with a key is the guard's to judge, when it comes.

    Args:
        app: The application.
        guard: Checks a request to `/records`.
    """

    def __init__(self, app: ASGIApp, guard: AdminGuard) -> None:
        self.app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and _is_ours(scope["path"]):
            try:
                self._guard.check_sender(Request(scope))
            except HTTPException as refused:
                reply = JSONResponse({"detail": refused.detail}, refused.status_code)
                await reply(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_ours(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def _stranger(request: Request) -> str:
    """Why a request may come from elsewhere, and what would be right; empty if it does not."""
    headers = request.headers
    relayed = [name for name in headers if name in _RELAYED or "forwarded" in name]
    if relayed:
        return f"a proxy passed this request on (it carries {_shown(relayed[0])}): ask directly"
    if request.client is not None and not _is_loopback(request.client.host):
        return f"this request came from {_shown(request.client.host)}"
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _is_loopback_host(hosts[0]):
        found = ", ".join(map(_shown, hosts)) or "no host"
        return f"this request was sent to {found}: ask localhost or 127.0.0.1"
    return _foreign_page(headers, hosts[0])


def _foreign_page(headers: Headers, host: str) -> str:
    """Why a browser may have sent a request for another site's page; empty if it did not."""
    for origin in headers.getlist("origin"):
        if origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return f"this request is that of a web page from {_shown(origin)}"
    for site in headers.getlist("sec-fetch-site"):
        if site not in ("same-origin", "none"):
            return f"this request is that of a web page from elsewhere ({_shown(site)})"
    return ""


def _is_loopback_host(host: str) -> bool:
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return False
    return match["name"] == "localhost" or _is_loopback(match["v6"] or match["name"])


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def _shown(text: str) -> str:
    return ascii(text[:_SHOWN])
