"""`recorder drain`: take runs into a file, and let the engines forget them once it is safe."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from recorder_core.cli.engines import Engines, connected
from recorder_core.cli.exits import CommandError, Exit, Interrupted, command_error
from recorder_core.cli.formats import counted, duration
from recorder_core.cli.places import urls
from recorder_core.cli.progress import Arrivals, progress
from recorder_core.cli.sources import nothing
from recorder_core.cli.streams import say
from recorder_core.cli.tables import write_json
from recorder_core.cli.whole import whole_file
from recorder_core.client import Drained, RecordClient
from recorder_core.codec import encode_stream
from recorder_core.errors import ClientError, LeaseError

_OTHER_FORMATS = (".jsonl", ".parquet", ".html")


class _Taking:
    """What is taken, and when it comes back if nobody acknowledges it."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.arrivals = Arrivals()
        self.drained: Drained | None = None

    @property
    def back(self) -> str:
        """When all of it is back, at the latest."""
        began = self.arrivals.began_at
        passed = 0.0 if began is None else time.monotonic() - began
        return duration(self.lease_s - passed)

    @property
    def interrupted(self) -> str:
        """What to say of it when it is cut short."""
        if self.drained is not None:
            records = counted(len(self.drained.records), "record")
        elif self.arrivals.records:
            records = f"{counted(self.arrivals.records, 'record')} or more"
        else:
            return f"not acknowledged; what was handed out comes back within {self.back}"
        return f"not acknowledged; {records} come back in {self.back}"


def run(args: argparse.Namespace) -> int:
    """Take them; acknowledge when the file is written, synced and renamed."""
    if args.output.suffix in _OTHER_FORMATS:
        raise CommandError(
            f"a drain writes the records themselves, not {args.output.suffix}: name the file .rec, "
            "and make others of it by `recorder export`",
            Exit.USAGE,
        )
    taking = _Taking(args.lease)
    with connected(args, urls(args.url), taking.arrivals) as client:
        try:
            drained = _take(client, args, taking)
        except KeyboardInterrupt:
            raise Interrupted(taking.interrupted) from None
        _acknowledge(client, drained, args.output, taking)
    _report(args, drained)
    return Exit.DONE


def _take(client: RecordClient, args: argparse.Namespace, taking: _Taking) -> Drained:
    """The runs, which are in the file when this returns.

    Raises:
        CommandError: There are none, or they cannot be written; then they are given back.
    """
    try:
        with whole_file(args.output, force=args.force) as part, progress(taking.arrivals, "taking"):
            taking.drained = client.lease(
                args.prefix, wait_s=args.wait, lease_s=args.lease, max_bytes=args.max_bytes
            )
            if not taking.drained.runs:
                client.ack(taking.drained)
                nothing(Engines(client), args.prefix)
            with part.open("wb") as file:
                file.writelines(encode_stream(taking.drained.runs))
            return taking.drained
    except (OSError, CommandError) as error:
        if taking.drained is None or not taking.drained.runs:
            raise
        why = error.strerror if isinstance(error, OSError) else str(error)
        back = counted(client.release(taking.drained), "record")
        raise CommandError(
            f"{args.output} is not written ({why}); {back} were given back"
        ) from None


def _acknowledge(client: RecordClient, drained: Drained, path: Path, taking: _Taking) -> None:
    records = counted(len(drained.records), "record")
    try:
        client.ack(drained)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{path} is written; whether its {records} are acknowledged is not known: else they "
            f"come back in {taking.back}"
        ) from None
    except (ClientError, LeaseError) as error:
        told = command_error(error)
        code = Exit.FAILED if told is None else told.code
        raise CommandError(
            f"{path} is written, but not all of its {records} are acknowledged: they come back as "
            f"well ({told})",
            code,
        ) from None


def _report(args: argparse.Namespace, drained: Drained) -> None:
    """What was taken, and what a trainer should know of it."""
    incomplete = {key.text: dict(missing) for key, missing in drained.incomplete.items()}
    if args.json:
        told = {
            "file": str(args.output),
            "runs": len(drained.runs),
            "records": len(drained.records),
            "pending": drained.pending,
            "more": drained.more,
            "flushed": drained.flushed,
            "incomplete": incomplete,
        }
        write_json([told])
    runs, records = counted(len(drained.runs), "run"), counted(len(drained.records), "record")
    say(f"{args.output}: {runs}, {records}, acknowledged")
    if drained.pending:
        say(f"still in flight there: {counted(drained.pending, 'generation')}")
    if drained.more:
        say("there are more: drain again, into another file")
    if not drained.flushed:
        say("the recorder had a backlog: what finished last may not be among them")
    if incomplete:
        names = ", ".join(list(incomplete)[:3]) + (" …" if len(incomplete) > 3 else "")
        say(f"incomplete: {counted(len(incomplete), 'run')} ({names})")
