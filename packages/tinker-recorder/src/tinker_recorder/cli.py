"""The command `tinker-recorder`: `run` records a script as it is, `serve` records agents."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recorder_core.codec import encode_records
from recorder_core.context import record_key
from recorder_core.errors import InvalidKeyError, RecorderError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.options import add_store_arguments, admin_key
from recorder_core.stores import MemoryStore
from tinker_recorder.recorder import TinkerRecorder

logger = logging.getLogger("tinker_recorder")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tinker-recorder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_serve(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
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
        "Tinker SDK. When it ends, however it ends, its records are written to a file.",
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
        default=Path("records.safetensors"),
        metavar="FILE",
        help="where the records go: recorder_core.decode_records reads them. "
        "Default: records.safetensors.",
    )
    run.add_argument("--strict", action="store_true", help="refuse samples without a record key")
    run.add_argument("script", help="the script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(call=_run)


def _run(args: argparse.Namespace) -> None:
    recorder = TinkerRecorder(MemoryStore(sys.maxsize), strict=args.strict)
    recorder.instrument()
    # What a script sees when Python itself runs it.
    sys.argv = [args.script, *args.args]
    sys.path[0] = str(Path(args.script).resolve().parent)
    try:
        with ExitStack() as stack:
            if args.key is not None:
                stack.enter_context(record_key(args.key))
            runpy.run_path(args.script, run_name="__main__")
    finally:
        recorder.close()
        records = recorder.store.get(KeyPrefix())
        args.out.write_bytes(encode_records(records))
        stats = recorder.stats()
        logger.info(
            "%d samples: %d recorded in %s, %d dropped; %d calls without a record key",
            stats.started,
            len(records),
            args.out,
            sum(stats.dropped.values()),
            sum(stats.unkeyed.values()),
        )


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
    if not args.api_key and not _is_loopback(args.host):
        raise SystemExit(
            f"tinker-recorder: error: on {args.host} whoever reaches the server would sample at "
            "your cost: give --api-key, or leave --host out"
        )
    try:
        import uvicorn

        from tinker_recorder import compat

        compat.check_sdk()
        from tinker_recorder.serve import Rendering, SamplerPool, create_app
    except ImportError as error:
        raise SystemExit(
            f"tinker-recorder: error: {error}; serve needs: pip install 'tinker-recorder[serve]'"
        ) from None
    samplers = SamplerPool(args.base_model, args.model_path, base_url=args.base_url)
    recorder = TinkerRecorder(MemoryStore(args.recording_max_bytes))
    app = create_app(
        samplers,
        Rendering(samplers.tokenizer(args.tokenizer), args.renderer),
        recorder.recorder,
        name=args.served_model_name,
        admin_key=admin_key(args),
        api_key=args.api_key,
        max_tokens=args.max_tokens,
    )
    logger.info(
        "Sampling from %s; recording under <batch>/<task>/<run> API keys; /records %s",
        samplers.current.weights.label,
        "wants the admin key"
        if admin_key(args)
        else "answers loopback only, as no admin key is set",
    )
    uvicorn.run(app, host=args.host, port=args.port, timeout_keep_alive=300)
    recorder.close()


def _record_key(text: str) -> RecordKey:
    try:
        return RecordKey.parse(text)
    except InvalidKeyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
