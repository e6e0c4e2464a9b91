"""`recorder view`: rollouts in a browser."""

from __future__ import annotations

import argparse
import importlib

from recorder_core.cli.adminkey import AdminKey
from recorder_core.cli.places import places


def run(args: argparse.Namespace) -> int:
    """Serve the page until it is interrupted."""
    where = places(args, prefixes=False)
    serve = importlib.import_module("recorder_core.view.serve")
    code: int = serve.run(
        [*map(str, where.files), *where.urls],
        port=args.port,
        open_browser=args.open,
        admin_key=AdminKey.of(args).text or None,
        tokenizer=args.tokenizer,
    )
    return code
