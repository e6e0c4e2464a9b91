"""What the words of a command line name: runs by a prefix, files, or engines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from recorder_core.cli.arguments import DEFAULT_URL
from recorder_core.cli.exits import CommandError, Exit
from recorder_core.environment import URL_VARIABLE
from recorder_core.keys import KeyPrefix

_SUFFIXES = (".rec", ".run", ".safetensors")
_PATHS = ("/", "./", "../", "~")


class Places(NamedTuple):
    """Which runs, and where they are: in files, else on engines."""

    prefix: KeyPrefix
    files: list[Path]
    urls: list[str]


def places(args: argparse.Namespace, *, prefixes: bool = True, files: bool = True) -> Places:
    """Sort the words of `args.what`.

    A word with `://` is an engine. One that is a file, ends as such files do or begins as paths do
    is a file. Any other is a prefix: `0/` where there is also a file `0`.

    Args:
        args: The command line.
        prefixes: Whether the command takes a prefix there.
        files: Whether it takes files.

    Raises:
        CommandError: They do not go together, or a file or URL cannot be used.
        InvalidKeyError: One is no prefix.
    """
    found_prefixes: list[str] = []
    found_files: list[Path] = []
    found_urls: list[str] = []
    for word in args.what:
        if "://" in word:
            found_urls.append(word)
        elif _is_file(word):
            found_files.append(_file(word))
        elif prefixes:
            found_prefixes.append(word)
        else:
            wanted = "neither a file that is there nor a URL"
            raise CommandError(f"{word!r} is {wanted}", Exit.USAGE)
    if found_files and not files:
        raise CommandError(
            f"{found_files[0]} is a file, and this command is for engines", Exit.USAGE
        )
    if found_files and (found_urls or args.url):
        raise CommandError("files and engines are given; give one or the other", Exit.USAGE)
    if len(found_prefixes) > 1:
        given = ", ".join(map(repr, found_prefixes))
        raise CommandError(
            f"{len(found_prefixes)} prefixes are given, {given}; give one", Exit.USAGE
        )
    prefix = KeyPrefix(found_prefixes[0] if found_prefixes else "")
    return Places(prefix, found_files, [] if found_files else urls([*args.url, *found_urls]))


def urls(given: Iterable[str]) -> list[str]:
    """The engines that are meant: as given, else as the environment says, else the default.

    Raises:
        CommandError: One is no URL.
    """
    texts = [part.strip() for text in given for part in text.split(",") if part.strip()]
    if not texts:
        said = os.environ.get(URL_VARIABLE, "")
        texts = [part.strip() for part in said.split(",") if part.strip()] or [DEFAULT_URL]
    for text in texts:
        if "://" not in text:
            # A password is not repeated.
            meant = "" if "@" in text else f"; did you mean http://{text}?"
            shown = "what is given" if "@" in text else repr(text)
            raise CommandError(f"{shown} is no URL{meant}", Exit.USAGE)
    return texts


def _is_file(word: str) -> bool:
    path = Path(word)
    try:
        there = path.is_file() and not word.endswith("/")
    except OSError:  # longer than a path may be, and than a key
        return False
    return there or path.suffix in _SUFFIXES or word.startswith(_PATHS)


def _file(word: str) -> Path:
    path = Path(word).expanduser()
    if path.is_dir():
        raise CommandError(f"{word!r} is a folder; name the files in it", Exit.USAGE)
    return path
