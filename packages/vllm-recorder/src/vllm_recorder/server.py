"""Mounts `/records` and the identity middleware on vLLM's own application."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import vllm.envs as envs
from fastapi import FastAPI
from prometheus_client import REGISTRY

from recorder_core.errors import UnsupportedEngineError
from recorder_core.options import RecordingOptions
from recorder_core.server import (
    AdminGuard,
    IdentityMiddleware,
    RecorderCollector,
    records_router,
)
from vllm_recorder import compat, hook

logger = logging.getLogger("vllm.recorder")


class RecordingEndpoints:
    """An `EndpointPlugin` of vLLM: `attach_router` first, `init_state` once the engine is up.

    Args:
        options: What the flags said.
        supported_tasks: The tasks of the served model.

    Raises:
        UnsupportedEngineError: The model does not generate.
    """

    name = "recorder"
    required_tasks = None

    def __init__(self, options: RecordingOptions, supported_tasks: Any) -> None:
        if "generate" not in (supported_tasks or ("generate",)):
            raise UnsupportedEngineError(
                f"--enable-recording: the model does not generate text (its tasks: "
                f"{supported_tasks}); start it without the flag"
            )
        self._options = options
        self._recorder = options.make_recorder()
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware."""
        args = app.state.args
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        build = app.build_middleware_stack
        # Around the whole stack, not added to it: of a composite key the engine's own
        # authentication, added later and so further out, must see the engine's part.
        app.build_middleware_stack = lambda: IdentityMiddleware(build(), keys)  # type: ignore[method-assign]
        app.include_router(
            records_router(
                self._recorder,
                guard=AdminGuard(self._options.admin_key),
                set_version=self._set_version,
            )
        )

    async def _set_version(self, version: str) -> None:
        await self._engine.update_weight_version(version)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Hook the engine's output processor.

        Raises:
            SystemExit: A hook point is missing.
        """
        self._engine = engine_client
        with compat.refusing():
            hook.install(
                engine_client,
                self._recorder,
                version=await engine_client.get_weight_version(),
                # Turned on by our flag alone, the API's replies must not show them.
                hide_routed_experts=getattr(args, "recording_hides_routed_experts", False),
            )
        REGISTRY.register(RecorderCollector(self._recorder))
        logger.info(
            "Recording generations under <batch>/<task>/<run> API keys; /records %s",
            "wants the admin key"
            if self._options.admin_key
            else "answers loopback only, as no admin key is set",
        )
