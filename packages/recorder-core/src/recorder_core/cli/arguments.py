"""What the command takes. Imports nothing that takes time: `--help` is to answer at once."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from recorder_core.cli.completion import PrintCompletion
from recorder_core.cli.exits import Exit
from recorder_core.cli.streams import say
from recorder_core.environment import ADMIN_KEY_VARIABLE, URL_VARIABLE
from recorder_core.keys import KeyPrefix, RecordKey

DEFAULT_URL = "http://localhost:8000"
DEFAULT_PORT = 7433
SORTS = ("key", "reward", "records", "pending", "bytes", "age")
FORMATS = ("jsonl", "parquet", "rec", "html", "atif", "prime_rl", "slime", "miles")
SHELLS = ("bash", "zsh", "tcsh")

_WHAT = "a key prefix such as 0 or 0/task-7; engines' URLs, or files, in place of the default"
_ENDINGS = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing matched, 4 not authorised, 5 unreachable,
130 interrupted. On a terminal tables are for people; in a pipe they are whole lines of
tab-separated values, a header first; --json gives an object a line.
"""


class PrintVersion(argparse.Action):
    """Prints which recorder-core this is, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        """Print it."""
        from importlib import metadata  # takes time, and is wanted here alone

        sys.stdout.write(f"recorder-core {metadata.version('recorder-core')}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End the command."""
        say(f"{message} (see {self.prog} --help)")
        self.exit(Exit.USAGE)


def parser() -> Parser:
    """The parser of the whole command; `command` is the subcommand's module."""
    top = Parser(
        prog="recorder",
        description="Look at recorded rollouts, and take them: from engines, or from files.",
        epilog=_ENDINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a script that completes the command in this shell",
    )
    top.add_argument("--version", action=PrintVersion, nargs=0, help="print the package's version")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for add in (_ls, _stats, _tail, _show, _drain, _export, _view, _reward, _version, _rm, _block):
        add(commands)
    return top


def _command(commands: Any, name: str, module: str, text: str, **defaults: Any) -> Parser:
    """A subcommand that asks engines."""
    made: Parser = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:])
    made.set_defaults(command=module, **defaults)
    engines = made.add_argument_group("engines")
    engines.add_argument(
        "--url",
        metavar="URL",
        action="append",
        default=[],
        help=f"an engine, or several, separated by commas; else {URL_VARIABLE}, else {DEFAULT_URL}",
    )
    engines.add_argument(
        "--admin-key-file",
        metavar="FILE",
        type=Path,
        help=f"a file that holds the admin key; else it is in {ADMIN_KEY_VARIABLE}",
    )
    return made


def _add_json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_output(command: Parser) -> None:
    command.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the file to write"
    )
    command.add_argument("--force", action="store_true", help="replace the file if it is there")


def _ls(commands: Any) -> None:
    ls = _command(commands, "ls", "ls", "list runs: rewards, generations, what is missing")
    ls.add_argument("what", nargs="*", metavar="PREFIX|FILE|URL", help=_WHAT)
    ls.add_argument("--sort", choices=SORTS, default="key", help="ascending; default: key")
    ls.add_argument("--reverse", action="store_true", help="descending")
    ls.add_argument("--limit", type=_count, metavar="N", help="the first N runs")
    _add_json(ls)


def _stats(commands: Any) -> None:
    stats = _command(commands, "stats", "stats", "counters of recorder and store, or of files")
    stats.add_argument("what", nargs="*", metavar="FILE|URL", help="files, or engines")
    _add_json(stats)


def _tail(commands: Any) -> None:
    tail = _command(commands, "tail", "tail", "follow generations as they are recorded")
    tail.add_argument("what", nargs="*", metavar="PREFIX|URL", help="a key prefix; engines")
    tail.add_argument(
        "-n",
        dest="last",
        type=_count_or_none,
        default=10,
        metavar="N",
        help="first, of the last runs, so many generations; default: 10",
    )
    tail.add_argument(
        "--min-lp",
        type=_number,
        metavar="LOGPROB",
        help="only generations with a token whose logprob is below this",
    )
    tail.add_argument("--for", dest="seconds", type=_seconds, metavar="S", help="end after so long")
    _add_json(tail)


def _show(commands: Any) -> None:
    show = _command(commands, "show", "show", "show one run: its forest, texts and tokens")
    show.add_argument("key", type=_key, metavar="KEY", help="the run: <batch>/<task>/<run>")
    show.add_argument("what", nargs="*", metavar="FILE|URL", help="files, or engines")
    show.add_argument(
        "--recent",
        action="store_true",
        help="with what was drained lately, as long as the engine remembers it",
    )
    show.add_argument("--leaf", type=_count, metavar="N", help="of this trajectory; default: 1")
    views = show.add_mutually_exclusive_group()
    for name, text in (
        ("forest", "only how its generations continue one another, and what is trained"),
        ("text", "only the trajectory's texts, whole"),
        ("tokens", "only the trajectory's tokens, with their logprobs"),
    ):
        views.add_argument(f"--{name}", dest="view", action="store_const", const=name, help=text)
    show.add_argument(
        "--around", type=_position, metavar="TOKEN", help="the tokens around this one, from 0"
    )
    show.add_argument(
        "--context", type=_count, default=20, metavar="N", help="so many on each side; default: 20"
    )
    _add_json(show)


def _drain(commands: Any) -> None:
    drain = _command(
        commands,
        "drain",
        "drain",
        "take runs into a file, and acknowledge them when it is on the disk",
    )
    drain.add_argument("prefix", type=_prefix, metavar="PREFIX", help="which runs")
    _add_output(drain)
    drain.add_argument(
        "--wait",
        type=_seconds_or_none,
        default=0.0,
        metavar="S",
        help="wait so long for generations in flight",
    )
    drain.add_argument(
        "--lease",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="after so long, what is not acknowledged comes back; default: 600",
    )
    drain.add_argument(
        "--max-bytes",
        type=_count,
        metavar="N",
        help="take whole runs until they come to so much of an engine's memory",
    )
    _add_json(drain)


def _export(commands: Any) -> None:
    export = _command(
        commands,
        "export",
        "export",
        "write trajectories for other programs; takes nothing away",
    )
    export.add_argument("what", nargs="*", metavar="PREFIX|FILE|URL", help=_WHAT)
    export.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: the standard output"
    )
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    export.add_argument(
        "--format", choices=FORMATS, help="default: by the file's suffix, else jsonl"
    )
    export.add_argument(
        "--name",
        metavar="NAME",
        help="of the agent, NAME or NAME@VERSION (atif), or of the environment (prime_rl)",
    )
    export.add_argument(
        "--rule",
        type=_rule,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what a trainer's format does with what cannot be trained, e.g. aborted=mask",
    )
    export.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="the text of tokens (html, --pieces) is from this one; default: the engine's",
    )
    export.add_argument(
        "--pieces",
        action="store_true",
        help="with the bytes of the tokens, so that the page shows a file as text (rec; html "
        "always has them)",
    )


def _view(commands: Any) -> None:
    view = _command(commands, "view", "view", "look at rollouts in a browser")
    view.add_argument("what", nargs="*", metavar="FILE|URL", help="files, or engines")
    view.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        metavar="PORT",
        help=f"of this machine; default: {DEFAULT_PORT}",
    )
    view.add_argument("--open", action="store_true", help="open the browser")
    view.add_argument("--tokenizer", metavar="DIR", help="a tokenizer, for the text of tokens")


def _reward(commands: Any) -> None:
    reward = _command(commands, "reward", "reward", "write a run's reward, or notes on it")
    reward.add_argument("key", type=_key, metavar="KEY", help="the run: <batch>/<task>/<run>")
    reward.add_argument("reward", type=_number, nargs="?", metavar="REWARD", help="a number")
    reward.add_argument(
        "--info",
        type=_note,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a note; VALUE is JSON, or else a text",
    )
    reward.add_argument(
        "--sample",
        action="append",
        metavar="ID",
        help="only this generation: a record's id, or that of an API's reply",
    )


def _version(commands: Any) -> None:
    version = _command(commands, "version", "version", "name the weights that sample from now on")
    version.add_argument("version", metavar="LABEL", help="a number, or any text")


def _rm(commands: Any) -> None:
    _add_removal(commands, "rm", "delete runs, drained ones that are not acknowledged included")


def _block(commands: Any) -> None:
    _add_removal(commands, "block", "refuse what is generated for these runs from now on")


def _add_removal(commands: Any, name: str, text: str) -> None:
    removal = _command(commands, name, name, text)
    removal.add_argument("prefix", type=_prefix, metavar="PREFIX", help="which runs; '' means all")
    removal.add_argument("--yes", action="store_true", help="do not ask")


def _read_prefix(text: str) -> KeyPrefix:
    if "://" in text:
        raise ValueError(
            f"{text!r} is an address, and no key prefix: give it as --url, or in {URL_VARIABLE}"
        )
    return KeyPrefix(text)


def _checked(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of arguments whose ValueErrors argparse shows as they are."""

    def read(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _whole(text: str, least: int, most: float = math.inf) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None
    if not least <= number <= most:
        upto = "" if most == math.inf else f" to {most}"
        raise ValueError(f"{text!r} is out of range: {least}{upto or ' or more'}")
    return number


def _real(text: str, least: float = -math.inf, *, more: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no finite number")
    if number < least or (more and number == least):
        raise ValueError(f"{text!r} is too little: {'more than ' if more else ''}{least:g}")
    return number


def _read_note(text: str) -> tuple[str, Any]:
    import json  # not before a note is given

    name, separator, value = text.partition("=")
    if not (name and separator):
        raise ValueError(f"{text!r} is no note; write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_rule(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise ValueError(f"{text!r} is no rule; write NAME=VALUE")
    return name, value


_count = _checked(lambda text: _whole(text, 1))
_count_or_none = _checked(lambda text: _whole(text, 0))
_position = _checked(lambda text: _whole(text, 0))
_port = _checked(lambda text: _whole(text, 0, 65535))
_number = _checked(_real)
_seconds = _checked(lambda text: _real(text, 0.0, more=True))
_seconds_or_none = _checked(lambda text: _real(text, 0.0))
_key = _checked(RecordKey.parse)
_prefix = _checked(_read_prefix)
_rule = _checked(_read_rule)
_note = _checked(_read_note)
