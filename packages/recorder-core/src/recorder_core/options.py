"""The command-line flags of recording: the same for every engine."""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from pydantic import BaseModel, ByteSize, ConfigDict, TypeAdapter, ValidationError

from recorder_core.adapters import AdapterVersions
from recorder_core.environment import ADMIN_KEY_VARIABLE, SECRET_VARIABLE
from recorder_core.errors import StoreFileError
from recorder_core.keys import check_secret
from recorder_core.recent import DEFAULT_RECENT_BYTES, Recent
from recorder_core.recorder import Recorder
from recorder_core.stores import MemoryStore, RecordStore
from recorder_core.stores.memory import DEFAULT_MAX_BYTES

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


class Secret(str):
    """A text that engines may log with their other arguments: it shows as `***`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class _Parser(Protocol):
    def add_argument_group(self, title: str, description: str) -> Any: ...


class RecordingOptions(BaseModel):
    """What the flags said."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    enabled: bool = False
    admin_key: Secret | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    aborted: Literal["keep", "drop"] = "keep"
    routed_experts: bool = False
    store: Path | None = None
    """The file of the store; None: it is in memory."""
    secret: Secret | None = None
    """What record keys have to be signed with; None: they are not signed."""
    recent_bytes: int = DEFAULT_RECENT_BYTES
    adapter_versions: AdapterVersions | None = None
    """None: every LoRA adapter's name is another adapter."""

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ
    ) -> RecordingOptions:
        """Read the flags; the admin key and the secret may come from the environment instead."""
        if not getattr(args, "enable_recording", False):
            _say_unused(args)
            return cls()
        return cls(
            enabled=True,
            admin_key=admin_key(args, environ),
            secret=secret(args, environ),
            max_bytes=args.recording_max_bytes,
            store=args.recording_store,
            aborted=args.recording_aborted,
            adapter_versions=args.recording_adapter_versions,
            routed_experts=args.recording_routed_experts,
            recent_bytes=args.recording_recent_bytes,
        )

    def make_recorder(self) -> Recorder:
        """A recorder over the store that the flags say; closed when the process ends.

        Raises:
            SystemExit: The store's file cannot be used; the message says why.
        """
        store = make_store(self.store, self.max_bytes, Recent(self.recent_bytes))
        recorder = Recorder(store, aborted=self.aborted, adapter_versions=self.adapter_versions)
        atexit.register(say_what_is_left, recorder, self.store)
        return recorder


def _say_unused(args: argparse.Namespace) -> None:
    given = [
        name for name, default in _defaults().items() if getattr(args, name, default) != default
    ]
    if given:
        _warn_unused(tuple(f"--{name.replace('_', '-')}" for name in given))


@functools.cache
def _defaults() -> dict[str, Any]:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return vars(parser.parse_args([]))


@functools.cache  # the arguments are read more than once in a process
def _warn_unused(flags: tuple[str, ...]) -> None:
    logger.warning("Nothing is recorded: %s without --enable-recording", ", ".join(flags))


def make_store(path: Path | None, max_bytes: int, recent: Recent) -> RecordStore:
    """The store that the flags say.

    Args:
        path: What `--recording-store` gave; None: memory.
        max_bytes: Its budget.
        recent: Is told of what is handed out.

    Raises:
        SystemExit: The file cannot be used; the message says why.
    """
    if path is None:
        return MemoryStore(max_bytes, recent=recent)
    from recorder_core.stores.sqlite import SQLiteStore  # some Pythons are built without SQLite

    try:
        return SQLiteStore(path, max_bytes, recent=recent)
    except StoreFileError as error:
        raise SystemExit(f"--recording-store: error: {error}") from None


def say_what_is_left(recorder: Recorder, path: Path | None = None) -> None:
    """Close a recorder and its store as the process ends, and log what nobody has drained.

    Args:
        recorder: Whose store.
        path: The store's file; None: it is in memory.
    """
    recorder.close(_CLOSE_S)
    store = recorder.store.stats()
    left = store.records + store.leased_records
    if left:
        logger.warning(
            "%d records were not drained, %d of them leased and not acknowledged: %s",
            *(left, store.leased_records),
            "they were in this process's memory, and are gone with it"
            if path is None
            else f"they are in {path}, and back with --recording-store sqlite://{path}",
        )
    recorder.store.close()


def admin_key(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The admin key that the flags or the environment give."""
    key = args.recording_admin_key or environ.get(ADMIN_KEY_VARIABLE)
    return Secret(key) if key else None


def secret(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that the flags or the environment give.

    Raises:
        SystemExit: It is too short; the message says so.
    """
    given = args.recording_secret or environ.get(SECRET_VARIABLE)
    try:
        return _secret(given) if given else None
    except ValueError as error:
        raise SystemExit(f"{SECRET_VARIABLE}: error: {error}") from None


def add_arguments(parser: _Parser) -> None:
    """Add the flags to a parser, in a group of their own."""
    group = parser.add_argument_group(
        "Recording",
        "Record every generation whose API key is <batch>/<task>/<run>, for training.",
    )
    group.add_argument(
        "--enable-recording",
        action="store_true",
        default=False,
        help="Record generations in this process and serve them under /records.",
    )
    add_store_arguments(group)
    group.add_argument(
        "--recording-aborted",
        choices=["keep", "drop"],
        default="keep",
        help="What to do with generations aborted after their first token. Default: keep.",
    )
    group.add_argument(
        "--recording-adapter-versions",
        type=_argument(AdapterVersions),
        default=None,
        metavar="REGEX",
        help="What of a LoRA adapter's name is its version: with [-]v(\\d+)$ policy-v2 is policy "
        "in version 2, and shares trajectories with policy-v1. Default: each name is an adapter of "
        "its own.",
    )
    group.add_argument(
        "--recording-routed-experts",
        action="store_true",
        default=False,
        help="Also record which experts routed each token of a mixture-of-experts model.",
    )


def add_store_arguments(group: Any) -> None:
    """Add the flags of `/records` and of the store behind it, which know no engine."""
    group.add_argument(
        "--recording-admin-key",
        type=_argument(_admin_key),
        default=None,
        metavar="KEY",
        help="Bearer token that /records asks for. Better given in the environment variable "
        f"{ADMIN_KEY_VARIABLE}, where `ps` does not show it. Without one, /records answers "
        "programs on this machine only.",
    )
    group.add_argument(
        "--recording-secret",
        type=_argument(_secret),
        default=None,
        metavar="SECRET",
        help="Record only generations whose record key is signed with this secret, as "
        "recorder_core.keys.sign and the scheduler do. Better given in the environment variable "
        f"{SECRET_VARIABLE}. Without one, whoever may generate may do so under any key.",
    )
    group.add_argument(
        "--recording-max-bytes",
        type=_argument(_byte_size),
        default=DEFAULT_MAX_BYTES,
        metavar="SIZE",
        help="Memory for records, e.g. 8GiB; beyond it the keys written to least recently are "
        "evicted. Default: 4GiB.",
    )
    group.add_argument(
        "--recording-store",
        type=_argument(_store),
        default=None,
        metavar="URL",
        help="Where records are kept: `memory`, or `sqlite:///path`, a file on a local disk from "
        "which they come back when the process has ended, whatever ended it. Default: memory.",
    )
    group.add_argument(
        "--recording-recent-bytes",
        type=_argument(_recent_size),
        default=DEFAULT_RECENT_BYTES,
        metavar="SIZE",
        help="Memory for drained runs that /records/view still shows; 0 keeps none. "
        "Default: 64MiB.",
    )


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of flag values whose ValueErrors argparse shows as they are."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(str(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _admin_key(text: str) -> Secret:
    if not text.strip():
        raise ValueError("the key is empty; leave the flag out to allow this machine only")
    return Secret(text)


def _secret(text: str) -> Secret:
    return Secret(check_secret(text))


def _store(text: str) -> Path | None:
    if text == "memory":
        return None
    scheme, given, path = text.partition("://")
    if scheme != "sqlite" or not given:
        raise ValueError(f"{text!r} is no store; write `memory` or sqlite:///path")
    # Four slashes are what other programs want of an absolute path.
    plain = "/" + unquote(path).lstrip("/")
    if not path.startswith("/") or plain.endswith("/") or "?" in path:
        raise ValueError(
            f"{text!r} names no file; write sqlite:// and its absolute path, e.g. "
            "sqlite:///var/lib/recorder/records.db"
        )
    return Path(plain)


def _recent_size(text: str) -> int:
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError:
        raise ValueError(f"{text!r} is no size; write bytes or a unit, e.g. 64MiB") from None


def _byte_size(text: str) -> int:
    try:
        size = int(_SIZE.validate_python(text))
    except ValidationError:
        raise ValueError(f"{text!r} is no size; write bytes or a unit, e.g. 8GiB") from None
    if size < 1024**2:
        raise ValueError(f"{text!r} is too little to hold records; at least 1MiB")
    return size
