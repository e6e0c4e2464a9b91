"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recorder_core.cli.exits import CommandError, Exit


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A file to write to beside `path`; synced and renamed when the block ends well, else removed.

    Args:
        path: Where the file is to be.
        force: Replace what is there.

    Raises:
        CommandError: `path` is there already, or nothing can be written there: before the block.
        OSError: The file cannot be synced or renamed.
    """
    check_free(path, force=force)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.open("ab").close()
    except OSError as error:
        raise CommandError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that exists and "
            "that you may write to"
        ) from None
    try:
        yield part
        _sync(part)
        if force:
            part.replace(path)
        else:
            _rename(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def check_free(path: Path, *, force: bool) -> None:
    """Check that a file may be put there.

    Raises:
        CommandError: Something else is there.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a folder; name a file", Exit.USAGE)
    if path.exists() and not force:
        raise CommandError(f"{path} exists; --force replaces it", Exit.USAGE)


def _rename(part: Path, path: Path) -> None:
    """Rename, but over nothing: another command may have written there meanwhile."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise CommandError(f"{path} is there now; --force replaces it", Exit.USAGE) from None
    except OSError:  # a file system without hard links
        part.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
