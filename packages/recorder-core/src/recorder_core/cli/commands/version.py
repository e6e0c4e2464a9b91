"""`recorder version`: the label of the weights that sample from now on."""

from __future__ import annotations

import argparse

from recorder_core.cli.engines import connected
from recorder_core.cli.exits import Exit
from recorder_core.cli.places import urls
from recorder_core.cli.streams import say


def run(args: argparse.Namespace) -> int:
    """Set it."""
    with connected(args, urls(args.url)) as client:
        client.set_version(args.version)
        say(f"{', '.join(client.urls)}: the weights are {args.version} from now on")
    return Exit.DONE
