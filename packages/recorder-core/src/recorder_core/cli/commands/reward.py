"""`recorder reward`: what is known of a run after it."""

from __future__ import annotations

import argparse

from recorder_core.cli.engines import Engines, connected
from recorder_core.cli.exits import CommandError, Exit
from recorder_core.cli.formats import counted
from recorder_core.cli.places import urls
from recorder_core.cli.sources import nothing
from recorder_core.cli.streams import say


def run(args: argparse.Namespace) -> int:
    """Write it."""
    if args.reward is None and not args.info:
        raise CommandError("give a reward, or a note by --info NAME=VALUE", Exit.USAGE)
    with connected(args, urls(args.url)) as client:
        updated = client.update_reward(
            args.key, args.reward, info=dict(args.info) or None, sample_ids=args.sample
        )
        if not updated and not client.keys(key=args.key):
            nothing(Engines(client), args.key)
    # A run whose first generation is in flight has none yet, and keeps the reward for it.
    later = "" if args.sample else ", and those that end later"
    say(f"{args.key}: {counted(updated, 'generation')}{later}")
    return Exit.DONE
