"""Serves SkyRL's Tinker API; run by the interpreter that has SkyRL, as a script of its own.

Two things are changed, neither of them sampling: its engine starts in the same environment, not by
way of `uv run` in a source checkout; and with --sequence-ids the answer to a sample request names
its sequences, as SDKs after 0.25 demand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, add_model, config_to_argv


def engine_command(_: list[str], config: EngineConfig) -> list[str]:
    """The command of the engine's process."""
    return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]


class SequenceIds:
    """ASGI layer that adds `sample_sequence_ids` to the answers of /asample, and nothing else."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] != "/api/v1/asample":
            await self.app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        samples = json.loads(body)["num_samples"]
        replayed = False
        started: dict[str, Any] = {}
        answer = b""

        async def again() -> dict[str, Any]:
            nonlocal replayed
            if replayed:
                return dict(await receive())
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def add(message: Any) -> None:
            nonlocal started, answer
            if message["type"] == "http.response.start":
                started = message
                return
            answer += message.get("body", b"")
            if message.get("more_body"):
                return
            if started["status"] == 200:
                ids = [f"sequence-{next(self._numbers)}" for _ in range(samples)]
                answer = json.dumps({**json.loads(answer), "sample_sequence_ids": ids}).encode()
            headers = [h for h in started["headers"] if h[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(answer)).encode()))
            await send({**started, "headers": headers})
            await send({"type": "http.response.body", "body": answer})

        await self.app(scope, again, add)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sequence-ids", action="store_true")
    args = vars(parser.parse_args())
    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = EngineConfig.model_validate(
        {name: value for name, value in args.items() if name in EngineConfig.model_fields}
    )
    app = SequenceIds(api.app) if args["sequence_ids"] else api.app
    uvicorn.run(app, host=args["host"], port=args["port"], timeout_keep_alive=300)


if __name__ == "__main__":
    main()
