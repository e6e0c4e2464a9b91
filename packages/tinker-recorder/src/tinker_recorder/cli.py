"""The command `tinker-recorder`: `run` records a script as it is, `serve` records agents."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recorder_core.errors import InvalidKeyError, RecorderError
from recorder_core.keys import RecordKey
from recorder_core.options import (
    add_store_arguments,
    admin_key,
    make_store,
    say_what_is_left,
    secret,
)
from recorder_core.recent import Recent
from recorder_core.stores import MemoryStore
from tinker_recorder.recorder import TinkerRecorder
from tinker_recorder.script import RecordFile, Script

logger = logging.getLogger("tinker_recorder")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tinker-recorder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_serve(commands)
    args = parser.parse_args(argv)
    try:
        args.call(args)
    except RecorderError as error:
        # At the command line the message is the answer, not a traceback.
        raise SystemExit(f"tinker-recorder: error: {error}") from None


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a Python script and record what it samples",
        description="Run a Python script, unchanged, and record what it samples through the "
        "Tinker SDK. When it ends, by itself or by a signal, its records are written to a file.",
    )
    run.add_argument(
        "--key",
        type=_record_key,
        metavar="KEY",
        help="the record key of samples started where the script has none in force",
    )
    run.add_argument(
        "--out",
        type=Path,
        default=Path("records.rec"),
        metavar="FILE",
        help="where the records go: recorder_core.decode_runs reads them. Default: records.rec.",
    )
    run.add_argument("--strict", action="store_true", help="refuse samples without a record key")
    run.add_argument("script", help="the script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(call=_run)


def _run(args: argparse.Namespace) -> None:
    out = RecordFile(args.out)
    recorder = TinkerRecorder(MemoryStore(sys.maxsize), strict=args.strict)
    Script(recorder, out).run(args.script, args.args, args.key)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a Tinker sampling client through the OpenAI API, and record it",
        description="An OpenAI-compatible server over a Tinker sampling client. An agent's API key "
        "is its record key; Tinker's own key stays here (TINKER_API_KEY).",
    )
    weights = serve.add_mutually_exclusive_group(required=True)
    weights.add_argument("--base-model", metavar="NAME", help="sample from a base model")
    weights.add_argument("--model-path", metavar="tinker://...", help="sample from saved weights")
    serve.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    serve.add_argument("--port", type=int, default=8000, help="default: 8000")
    serve.add_argument(
        "--api-key", metavar="K", help="what agents must know: they send K:<record key>"
    )
    serve.add_argument("--base-url", metavar="URL", help="the Tinker service, else TINKER_BASE_URL")
    serve.add_argument(
        "--connect-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long to wait at start until the Tinker service answers, in seconds. Default: 60.",
    )
    serve.add_argument("--served-model-name", metavar="NAME", help="the model's name in the API")
    serve.add_argument(
        "--tokenizer", metavar="NAME", help="a tokenizer's name or folder; default: the model's"
    )
    serve.add_argument(
        "--renderer",
        default="auto",
        metavar="NAME",
        help="the chat format: a renderer's name, or its settings as JSON, e.g. "
        '{"name": "qwen3", "enable_thinking": false}. Default: that of the model where it is '
        "known, else the model's Hugging Face chat template.",
    )
    serve.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="the limit of requests that name none. Default: 2048.",
    )
    add_store_arguments(serve.add_argument_group("Recording"))
    serve.set_defaults(call=_serve)


def _serve(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if not args.api_key and not _is_loopback(args.host):
        raise SystemExit(
            f"tinker-recorder: error: on {args.host} whoever reaches the server would sample at "
            "your cost: give --api-key, or leave --host out"
        )
    try:
        import uvicorn

        from recorder_core.server import AdminGuard
        from tinker_recorder import compat

        compat.check_sdk()
        from tinker_recorder.serve import Rendering, connect, create_app
    except ImportError as error:
        raise SystemExit(
            f"tinker-recorder: error: {error}; serve needs: pip install 'tinker-recorder[serve]'"
        ) from None
    samplers = connect(
        args.base_model,
        args.model_path,
        base_url=args.base_url,
        timeout_s=args.connect_timeout,
    )
    recent = Recent(args.recording_recent_bytes)
    store = make_store(args.recording_store, args.recording_max_bytes, recent)
    recorder = TinkerRecorder(store)
    guard = AdminGuard(admin_key(args))
    app = create_app(
        samplers,
        Rendering(samplers.tokenizer(args.tokenizer), args.renderer),
        recorder.recorder,
        name=args.served_model_name,
        guard=guard,
        api_key=args.api_key,
        secret=secret(args),
        max_tokens=args.max_tokens,
    )
    logger.info(
        "Sampling from %s; recording under <batch>/<task>/<run> API keys; /records %s",
        samplers.current.weights.label,
        guard.audience,
    )
    uvicorn.run(app, host=args.host, port=args.port, timeout_keep_alive=300)
    recorder.close()
    say_what_is_left(recorder.recorder, args.recording_store)


def _record_key(text: str) -> RecordKey:
    try:
        return RecordKey.parse(text)
    except InvalidKeyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait: give seconds above 0")
    return seconds


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
