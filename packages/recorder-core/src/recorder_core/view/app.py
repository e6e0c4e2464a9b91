"""The application of a server of its own: the routes that the page reads, over several sources."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from pydantic import BaseModel

from recorder_core.keys import RecordKey
from recorder_core.protocol import PREFIX, KeyReply
from recorder_core.server.auth import AdminGuard
from recorder_core.server.bodies import read_body
from recorder_core.server.guarding import guarded_by
from recorder_core.server.looking import add_looking, add_page
from recorder_core.view.sources import Sources

_THREADS = 2
_MAX_KEYS = 1_000


class SessionRequest(BaseModel):
    """`POST /records/session`: the token from the page's address."""

    token: str


class SessionReply(BaseModel):
    """What the page sends as its key from now on."""

    session: str


def create_app(sources: Sources, token: str, ready: Callable[[], None]) -> FastAPI:
    """The application; it answers programs and pages of this machine only.

    Args:
        sources: What is shown.
        token: Works once, for `POST /records/session`.
        ready: Called when the application has started.
    """
    here, session = AdminGuard(None), secrets.token_urlsafe(24)
    with_session, tokens = AdminGuard(session), {token}

    def guard(request: Request) -> None:
        here(request)
        with_session(request)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = [asyncio.create_task(replica.follow()) for replica in sources.replicas]
        ready()
        yield
        for task in following:
            task.cancel()

    opening = APIRouter(prefix=PREFIX, route_class=guarded_by(here))
    router = APIRouter(prefix=PREFIX, route_class=guarded_by(guard))

    @opening.post("/session")
    async def begin(request: Request) -> SessionReply:
        """Change the token for the session's key."""
        given = (await read_body(SessionRequest, request)).token.encode(errors="replace")
        if not any(hmac.compare_digest(given, each.encode()) for each in tokens):
            raise HTTPException(403, "this address was opened before, and works once")
        tokens.clear()
        return SessionReply(session=session)

    @router.get("/keys")
    async def keys(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=_MAX_KEYS)] = _MAX_KEYS
    ) -> list[KeyReply]:
        """What there is, run by run, a page at a time."""
        return await sources.keys(None if after is None else RecordKey.parse(after), limit)

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """The counters of all, added up."""
        return await sources.stats()

    add_looking(router, sources, ThreadPoolExecutor(_THREADS, thread_name_prefix="view"))
    add_page(router)
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(opening)
    app.include_router(router)
    return app
