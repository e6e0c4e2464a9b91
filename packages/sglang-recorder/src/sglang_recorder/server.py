"""Mounts `/records` and the identity middleware on SGLang's application."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel
from starlette.routing import Mount

from recorder_core.errors import UnsupportedEngineError
from recorder_core.options import RecordingOptions
from recorder_core.recorder import Recorder
from recorder_core.server import (
    AdminGuard,
    IdentityMiddleware,
    PageMiddleware,
    PreflightGuard,
    RecorderCollector,
    records_router,
)
from recorder_core.view.pieces import pieces_of
from sglang_recorder import hook_points
from sglang_recorder.hook import Hook
from sglang_recorder.sampling import ORIGINAL

logger = logging.getLogger("sglang.recorder")


def mount(options: RecordingOptions, manager: Any) -> Hook:
    """Record what a tokenizer manager generates, and serve `/records` on SGLang's application.

    Raises:
        UnsupportedEngineError: The model cannot be recorded as asked.
    """
    app, server_args = http_server.app, manager.server_args
    check_model(options, manager.model_config, server_args)
    recorder = options.make_recorder()
    installed = hook_points.install(manager, recorder, routed_experts=options.routed_experts)
    guard = guard_of(options, server_args)
    wrap(app, guard, engine_keys(server_args), options.secret)
    router = records_router(
        recorder,
        guard=guard,
        set_version=installed.set_version,
        pieces=lambda ids: pieces_of(manager.tokenizer, ids),
    )
    add_routes(app, router)
    if server_args.enable_metrics:
        _export(app, recorder)
    say_what_is_recorded(installed, guard)
    return installed


def check_model(options: RecordingOptions, config: Any, server_args: Any) -> None:
    """Refuse a model that cannot be recorded as asked.

    Args:
        options: What the flags said.
        config: SGLang's `ModelConfig`.
        server_args: SGLang's `ServerArgs`.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    if not config.is_generation:
        raise UnsupportedEngineError(
            "--enable-recording: the model does not generate text; start it without the flag"
        )
    if not options.routed_experts:
        return
    if not getattr(config.hf_text_config, "num_experts_per_tok", None):
        raise UnsupportedEngineError(
            "--recording-routed-experts: the model has no experts; leave the flag out"
        )
    if not server_args.enable_return_routed_experts:
        raise UnsupportedEngineError(
            "--recording-routed-experts: SGLang was started without "
            "--enable-return-routed-experts; give it that too"
        )


def guard_of(options: RecordingOptions, server_args: Any) -> AdminGuard:
    """Who may use `/records`: SGLang's admin key opens it unless recording has one of its own."""
    return AdminGuard(options.admin_key or server_args.admin_api_key)


def engine_keys(server_args: Any) -> list[str]:
    """SGLang's own keys, which are no part of a record key."""
    return [key for key in (server_args.api_key, server_args.admin_api_key) if key]


def wrap(app: FastAPI, guard: AdminGuard, keys: Sequence[str], secret: str | None) -> None:
    """Put the identity middleware around an application that has served nothing yet.

    Args:
        app: The application.
        guard: Who may use `/records`.
        keys: SGLang's own keys.
        secret: What record keys have to be signed with; None: they are not signed.
    """
    build = app.build_middleware_stack
    # Around the whole stack, not added to it: of a composite key SGLang's own authentication, added
    # later and so further out, must see SGLang's part.
    app.build_middleware_stack = lambda: IdentityMiddleware(  # type: ignore[method-assign]
        # The page is asked for without a key, which SGLang would want of every path.
        PageMiddleware(PreflightGuard(build(), guard)),
        keys,
        secret,
    )


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Serve `/records` on an application of SGLang's."""
    for route in router.routes:
        # Should SGLang's authentication not let them through to ours, then as for an admin.
        route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
        app.router.routes.append(route)


def _export(app: FastAPI, recorder: Recorder) -> None:
    """SGLang's `/metrics` with the recorder's counters; SGLang adds its own route later."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(RecorderCollector(recorder))
    route = Mount("/metrics", make_asgi_app(registry=registry))
    route.path_regex = re.compile("^/metrics(?P<path>.*)$")  # no redirect to `/metrics/`
    app.router.routes.append(route)


def say_what_is_recorded(installed: Hook, guard: AdminGuard) -> None:
    """Log which logprobs are recorded, and who may take the records."""
    logger.info(
        "Logprobs are recorded %s: a trainer's ratios need its own to be the same, and are exact "
        "with top_k -1, top_p 1 and min_p 0",
        "before temperature (SGLANG_RETURN_ORIGINAL_LOGPROB)"
        if installed.sampler.logprobs_mode == ORIGINAL
        else "at the request's temperature, before top_k, top_p and min_p",
    )
    logger.info(
        "Recording generations under <batch>/<task>/<run> API keys; /records %s",
        guard.audience,
    )
