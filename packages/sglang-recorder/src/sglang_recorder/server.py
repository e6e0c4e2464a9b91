"""Mounts `/records` and the identity middleware on SGLang's own application."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import ssl
import urllib.request
from collections.abc import Callable
from typing import Any

import sglang
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.entrypoints import http_server
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.auth import AuthLevel
from starlette.routing import Mount

from recorder_core.errors import UnsupportedEngineError
from recorder_core.keys import RecordKey
from recorder_core.local import LocalRecords
from recorder_core.options import RecordingOptions
from recorder_core.protocol import KEY_HEADER
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
from sglang_recorder import compat, hook_points
from sglang_recorder.hook import Hook
from sglang_recorder.sampling import ORIGINAL

logger = logging.getLogger("sglang.recorder")

_CHECK_KEY = RecordKey("sglang-recorder", "start-check", 0)
_CHECK_TIMEOUT_S = 600.0


def attach(
    options: RecordingOptions, launch: Callable[..., Any], *args: Any, **kwargs: Any
) -> inspect.BoundArguments:
    """Before SGLang's last step, when its engine is up and it is about to listen.

    Args:
        options: What the flags said.
        launch: SGLang's `_setup_and_run_http_server`.
        *args: Its arguments.
        **kwargs: Its arguments.

    Returns:
        The arguments to go on with.

    Raises:
        UnsupportedEngineError: The model cannot be recorded as asked.
    """
    call = inspect.signature(launch).bind(*args, **kwargs)
    call.apply_defaults()
    server_args = call.arguments["server_args"]
    installed = mount(options, call.arguments["tokenizer_manager"])
    warm_up = call.arguments["execute_warmup_func"]
    call.arguments["execute_warmup_func"] = functools.partial(_warm_up, warm_up, installed)
    if server_args.skip_server_warmup:
        if not compat.SUPPORT.is_tested(compat.SUPPORT.check_version(sglang.__version__)):
            raise UnsupportedEngineError(
                "--enable-recording: --skip-server-warmup also skips the check that a generation "
                "is recorded, and this SGLang is untested: leave it out, or install SGLang "
                f"{compat.SUPPORT.tested}"
            )
        logger.warning("--skip-server-warmup also skips the check that a generation is recorded")
    return call


def mount(options: RecordingOptions, manager: Any) -> Hook:
    """Record what a tokenizer manager generates, and serve `/records` on SGLang's application.

    Raises:
        UnsupportedEngineError: The model cannot be recorded as asked.
    """
    installed = _install(options, manager)
    _mount(options, installed, manager)
    return installed


def _install(options: RecordingOptions, manager: Any) -> Hook:
    if not manager.is_generation:
        raise UnsupportedEngineError(
            "--enable-recording: the model does not generate text; start it without the flag"
        )
    config = manager.model_config.hf_text_config
    if options.routed_experts and not getattr(config, "num_experts_per_tok", None):
        raise UnsupportedEngineError(
            "--recording-routed-experts: the model has no experts; leave the flag out"
        )
    if options.routed_experts and not manager.server_args.enable_return_routed_experts:
        raise UnsupportedEngineError(
            "--recording-routed-experts: SGLang was started without "
            "--enable-return-routed-experts; give it that too"
        )
    return hook_points.install(
        manager, options.make_recorder(), routed_experts=options.routed_experts
    )


def _mount(options: RecordingOptions, installed: Hook, manager: Any) -> None:
    app, server_args = http_server.app, manager.server_args
    # SGLang's admin key opens /records unless recording has one of its own.
    guard = AdminGuard(options.admin_key or server_args.admin_api_key)
    router = records_router(
        installed.recorder,
        guard=guard,
        set_version=installed.weights.set_version,
        pieces=lambda ids: pieces_of(manager.tokenizer, ids),
    )
    for route in router.routes:
        # Should SGLang's authentication not let them through to ours, then as for an admin.
        route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
        app.router.routes.append(route)
    keys = [key for key in (server_args.api_key, server_args.admin_api_key) if key]
    build = app.build_middleware_stack
    # Around the whole stack, not added to it: of a composite key SGLang's own authentication, added
    # later and so further out, must see SGLang's part.
    app.build_middleware_stack = lambda: IdentityMiddleware(
        # The page is asked for without a key, which SGLang would want of every path.
        PageMiddleware(PreflightGuard(build(), guard)),
        keys,
        options.secret,
    )
    if server_args.enable_metrics:
        _export(app, installed.recorder)
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


def _export(app: FastAPI, recorder: Recorder) -> None:
    """SGLang's `/metrics` with the recorder's counters; SGLang adds its own route later."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(RecorderCollector(recorder))
    route = Mount("/metrics", make_asgi_app(registry=registry))
    route.path_regex = re.compile("^/metrics(?P<path>.*)$")  # no redirect to `/metrics/`
    app.router.routes.append(route)


def _warm_up(warm_up: Callable[..., Any], installed: Hook, server_args: Any) -> Any:
    """SGLang's own warm-up, then a generation that must yield a record; else the server ends."""
    done = warm_up(server_args)
    if not done:
        return done
    try:
        _check(installed, server_args)
    except Exception:
        logger.exception("--enable-recording: a generation yielded no record; the server ends")
        kill_process_tree(os.getpid())
    return done


def _check(installed: Hook, server_args: Any) -> None:
    """Send a request as a client would, and look for its record.

    Raises:
        UnsupportedEngineError: There is none.
    """
    recorder = Recorder()
    installed.probe = (_CHECK_KEY, recorder)
    try:
        body: dict[str, Any] = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        }
        if server_args.disaggregation_mode == "decode":
            # As SGLang's own warm-up: no prefill server takes part.
            body |= {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
        request = urllib.request.Request(  # noqa: S310 - the server's own address
            f"{server_args.url()}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", KEY_HEADER: _CHECK_KEY.text},
        )
        if server_args.api_key:
            request.add_header("Authorization", f"Bearer {server_args.api_key}")
        context = ssl._create_unverified_context() if server_args.ssl_certfile else None  # noqa: S323
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=_CHECK_TIMEOUT_S, context=context
        ) as reply:
            output = json.load(reply)["output_ids"]
        recorder.flush(_CHECK_TIMEOUT_S)
        records = LocalRecords(recorder).get()
    finally:
        installed.probe = None
        recorder.close()
    found = [record.response_ids.tolist() for record in records if record.logprobs is not None]
    if found != [output]:
        raise UnsupportedEngineError(
            f"the engine answered with the tokens {output}, recorded with logprobs were {found}"
        )
