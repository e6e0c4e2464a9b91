"""Mounts `/records` and the identity middleware on vLLM's own application."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import vllm
import vllm.envs as envs
from fastapi import APIRouter, FastAPI
from prometheus_client import REGISTRY
from vllm import SamplingParams

from recorder_core.context import record_key
from recorder_core.errors import UnsupportedEngineError
from recorder_core.host.messages import Folder
from recorder_core.host.news import exchange_news
from recorder_core.host.passing import passing_router
from recorder_core.host.relay import Relay
from recorder_core.keys import RecordKey
from recorder_core.local import LocalRecords
from recorder_core.options import RecordingOptions
from recorder_core.recorder import Recorder
from recorder_core.server import (
    AdminGuard,
    IdentityMiddleware,
    PreflightGuard,
    RecorderCollector,
    records_router,
)
from recorder_core.view.pieces import Pieces, pieces_of
from vllm_recorder import compat, hook

logger = logging.getLogger("vllm.recorder")

_CHECK_KEY = RecordKey("vllm-recorder", "start-check", 0)
_CHECK_TIMEOUT_S = 600.0
SetVersion = Callable[[str], Awaitable[None]]


class RecordingEndpoints:
    """An `EndpointPlugin` of vLLM: `attach_router` first, `init_state` once the engine is up.

    Args:
        options: What the flags said.
        supported_tasks: The tasks of the served model.
        folder: Where the recorder of several API servers is; None: this is the only one.

    Raises:
        UnsupportedEngineError: The model does not generate.
    """

    name = "recorder"
    required_tasks = None

    def __init__(
        self, options: RecordingOptions, supported_tasks: Any, folder: str | None = None
    ) -> None:
        if "generate" not in (supported_tasks or ("generate",)):
            raise UnsupportedEngineError(
                f"--enable-recording: the model does not generate text (its tasks: "
                f"{supported_tasks}); start it without the flag"
            )
        self._options = options
        self._guard = AdminGuard(options.admin_key)
        self._records = Passed(options, folder) if folder else Kept(options)
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware."""
        args = app.state.args
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        build = app.build_middleware_stack
        # Around the whole stack, not added to it: of a composite key the engine's own
        # authentication, added later and so further out, must see the engine's part.
        app.build_middleware_stack = lambda: IdentityMiddleware(  # type: ignore[method-assign]
            PreflightGuard(build(), self._guard), keys, self._options.secret
        )
        app.include_router(self._records.router(self._guard, self._set_version, self._pieces))

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        return pieces_of(self._engine.tokenizer, ids)

    async def _set_version(self, version: str) -> None:
        await self._engine.update_weight_version(version)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Hook the engine's output processor.

        Raises:
            SystemExit: A hook point is missing, or an untested vLLM's generation is not recorded.
        """
        self._engine = engine_client
        with compat.SUPPORT.refusing():
            if self._options.routed_experts:
                compat.check_experts_are_returned(engine_client.vllm_config)
            if not compat.SUPPORT.is_tested(compat.SUPPORT.check_version(vllm.__version__)):
                await _check(engine_client)
            installed = hook.install(
                engine_client,
                self._records.recorder,
                version=await engine_client.get_weight_version(),
                # Turned on by our flag alone, the API's replies must not show them.
                hide_routed_experts=getattr(args, "recording_hides_routed_experts", False),
            )
        self._records.join(installed)
        logger.info(
            "Recording generations under <batch>/<task>/<run> API keys; /records %s",
            self._guard.audience,
        )


class Kept:
    """The records of the only API server: in this process.

    Args:
        options: What the flags said.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self.recorder = options.make_recorder()

    def router(self, guard: AdminGuard, set_version: SetVersion, pieces: Pieces) -> APIRouter:
        """The routes."""
        return records_router(self.recorder, guard=guard, set_version=set_version, pieces=pieces)

    def join(self, installed: hook.Hook) -> None:
        """The engine is hooked."""
        REGISTRY.register(RecorderCollector(self.recorder))


class Passed:
    """The records of several API servers: in a process of their own.

    Args:
        options: What the flags said.
        folder: Where it is.
    """

    def __init__(self, options: RecordingOptions, folder: str) -> None:
        self._folder = Folder(Path(folder))
        self.recorder = Relay(self._folder, aborted=options.aborted)

    def router(self, guard: AdminGuard, set_version: SetVersion, pieces: Pieces) -> APIRouter:
        """The routes."""
        return passing_router(
            self._folder,
            guard=guard,
            set_version=set_version,
            pieces=pieces,
            count_error=self.recorder.count_error,
        )

    def join(self, installed: hook.Hook) -> None:
        """The engine is hooked: tell other front ends of its weights, and hear them."""
        weights = installed.weights
        weights.tell = exchange_news(self.recorder, weights.hear)


async def _check(engine: Any) -> None:
    """Generate two tokens, and look for their record.

    Raises:
        UnsupportedEngineError: There is none, or not with the ids and logprobs of the output.
    """
    recorder = Recorder()
    hook.install(engine, recorder, version=await engine.get_weight_version())
    try:
        output = await asyncio.wait_for(_generated(engine), _CHECK_TIMEOUT_S)
        records = await asyncio.to_thread(LocalRecords(recorder).get)
    except Exception as error:
        raise UnsupportedEngineError(
            f"--enable-recording: in this untested vLLM the generation that is to show that "
            f"recording works failed: {error!r}. Install vLLM {compat.SUPPORT.tested}"
        ) from error
    finally:
        hook.uninstall(engine)
        recorder.close()
    found = [record.response_ids.tolist() for record in records if record.logprobs is not None]
    if found != [output]:
        raise UnsupportedEngineError(
            f"--enable-recording: in this untested vLLM the engine answered with the tokens "
            f"{output}, recorded with logprobs were {found}. Install vLLM "
            f"{compat.SUPPORT.tested}"
        )


async def _generated(engine: Any) -> list[int]:
    tokens: list[int] = []
    # An engine that returns sampling masks takes no request without a top_k.
    params = SamplingParams(max_tokens=2, ignore_eos=True, top_k=20)
    with record_key(_CHECK_KEY):
        prompt = {"prompt_token_ids": [1, 2, 3]}
        async for output in engine.generate(prompt, params, request_id=_CHECK_KEY.text):
            tokens = list(output.outputs[0].token_ids)
    return tokens
