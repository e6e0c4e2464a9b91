"""What goes between a scheduler and its runners: lines of JSON. A bad one costs one run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from recorder_core.rollout.address import EngineAddress
from recorder_core.rollout.messages import printable
from recorder_core.rollout.status import Failure, Status
from recorder_core.rollout.task import Task

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20
READY = -1
"""The number of the reply that says that a process is ready."""

_NUMBER = re.compile(rb'\s*\{\s*"number"\s*:\s*(\d{1,18})\b')
"""How every line begins, so that its number can be read where the rest cannot."""
_EXCERPT = 200


class RunRequest(BaseModel):
    """One run, as a runner is sent it."""

    task: Task
    engine: EngineAddress
    timeout_s: float


class Command(BaseModel):
    """A line to a runner: a run to carry out, or without one, to cancel."""

    number: int
    request: RunRequest | None = None

    @property
    def line(self) -> bytes:
        """As it is sent."""
        return self.model_dump_json().encode() + b"\n"


class Reply(BaseModel):
    """A line from a runner: what became of a run."""

    number: int
    status: Status | None = None
    error: str = ""
    """Why there is no status."""

    @property
    def line(self) -> bytes:
        """As it is sent: a status that is too large is an error instead."""
        text = self.model_dump_json().encode()
        if len(text) > MAX_REPLY_BYTES:
            error = (
                f"its status takes {len(text)} bytes as JSON, of at most {MAX_REPLY_BYTES}; "
                "give fewer metrics"
            )
            text = Reply(number=self.number, error=error).model_dump_json().encode()
        # The first line break ends whatever something else has left half written.
        return b"\n" + text + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Reply | None:
        """The reply of a line; one that cannot be read fails the run that it names, if it does."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            number = number_of(line)
            excerpt = printable(line[:_EXCERPT].decode(errors="backslashreplace"), _EXCERPT)
            why = error.errors(include_url=False)[0]["msg"]
            logger.warning("a runner's reply cannot be read (%s): %s", why, excerpt)
            if number is None:
                return None
            return cls(number=number, error=f"its reply cannot be read ({why}): {excerpt}")

    def status_of(self, task: Task) -> Status:
        """What became of the run that was asked for under this number."""
        if self.status is None:
            return Status.failure(task, Failure.ERROR, self.error or "its reply has no status")
        try:
            return self.status.checked(task)
        except ValueError as error:
            logger.warning("the reply for run %s is wrong: %s", task.api_key, error)
            return Status.failure(task, Failure.ERROR, f"its reply {error}")


class Lines:
    """Cuts a stream into lines; of one that is longer than a reply may be, the rest is left out."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that end in the next piece of the stream, empty ones left out."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._keep(part)
            if self._begun:
                yield bytes(self._begun)
            self._begun.clear()
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._begun += part[: MAX_REPLY_BYTES - len(self._begun)]


def number_of(line: bytes) -> int | None:
    """The number of the run that a line is about, if it can be read."""
    found = _NUMBER.match(line)
    return int(found[1]) if found else None
