"""The command-line flags of recording: the same for every engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ByteSize, ConfigDict, TypeAdapter, ValidationError

from recorder_core.recorder import Recorder
from recorder_core.stores import MemoryStore
from recorder_core.stores.memory import DEFAULT_MAX_BYTES

ADMIN_KEY_VARIABLE = "RECORDER_ADMIN_KEY"
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


class AdminKey(str):
    """A key that engines may log with their other arguments: it shows as `***`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class _Parser(Protocol):
    def add_argument_group(self, title: str, description: str) -> Any: ...


class RecordingOptions(BaseModel):
    """What the flags said."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    enabled: bool = False
    admin_key: AdminKey | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    aborted: Literal["keep", "drop"] = "keep"
    routed_experts: bool = False

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ
    ) -> RecordingOptions:
        """Read the flags; the admin key may come from the environment instead."""
        if not getattr(args, "enable_recording", False):
            return cls()
        return cls(
            enabled=True,
            admin_key=admin_key(args, environ),
            max_bytes=args.recording_max_bytes,
            aborted=args.recording_aborted,
            routed_experts=args.recording_routed_experts,
        )

    def make_recorder(self) -> Recorder:
        """A recorder over a `MemoryStore`, as the flags say."""
        return Recorder(MemoryStore(self.max_bytes), aborted=self.aborted)


def admin_key(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AdminKey | None:
    """The admin key that the flags or the environment give."""
    key = args.recording_admin_key or environ.get(ADMIN_KEY_VARIABLE)
    return AdminKey(key) if key else None


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
        "loopback only.",
    )
    group.add_argument(
        "--recording-max-bytes",
        type=_argument(_byte_size),
        default=DEFAULT_MAX_BYTES,
        metavar="SIZE",
        help="Memory for records, e.g. 8GiB; beyond it the keys written to least recently are "
        "evicted. Default: 4GiB.",
    )


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of flag values whose ValueErrors argparse shows as they are."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(str(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _admin_key(text: str) -> AdminKey:
    if not text.strip():
        raise ValueError("the key is empty; leave the flag out to allow loopback only")
    return AdminKey(text)


def _byte_size(text: str) -> int:
    try:
        size = int(_SIZE.validate_python(text))
    except ValidationError:
        raise ValueError(f"{text!r} is no size; write bytes or a unit, e.g. 8GiB") from None
    if size < 1024**2:
        raise ValueError(f"{text!r} is too little to hold records; at least 1MiB")
    return size
