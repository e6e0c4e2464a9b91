"""Who may use `/records`: the holder of the admin key, or, without one, this machine."""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import HTTPException, Request


class AdminGuard:
    """Checks a request to `/records`.

    Args:
        admin_key: The bearer token that is asked for; None lets requests from loopback in.
    """

    def __init__(self, admin_key: str | None) -> None:
        if admin_key is not None and not admin_key.strip():
            raise ValueError("the admin key is empty; leave it out to allow loopback only")
        self._admin_key = admin_key.strip().encode() if admin_key is not None else None

    def __call__(self, request: Request) -> None:
        """Let the request pass.

        Raises:
            HTTPException: 401 for a missing or wrong key, 403 for a remote peer without one.
        """
        if self._admin_key is None:
            if not _is_loopback(request):
                raise HTTPException(
                    403,
                    "/records answers this machine only: no admin key is set. Start the server "
                    "with --recording-admin-key to use it from elsewhere.",
                )
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Header bytes are read as Latin-1: this gives back the bytes that were sent.
        given = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not hmac.compare_digest(given, self._admin_key):
            raise HTTPException(
                401,
                "/records wants the recording admin key as its bearer token",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _is_loopback(request: Request) -> bool:
    if request.client is None:
        return True  # a unix socket
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
