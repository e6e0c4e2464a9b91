"""The exception hierarchy: everything that the packages raise on purpose is a `RecorderError`."""

from __future__ import annotations


class RecorderError(Exception):
    """Base of every error raised by the recorder packages."""


class InvalidKeyError(RecorderError, ValueError):
    """A text is not a record key or key prefix."""


class SignatureError(InvalidKeyError):
    """A record key is not signed, no longer valid, or signed by somebody else.

    Args:
        reason: `unsigned`, `expired` or `forged`.
        text: The same in words; shows no part of the key.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, str(self))


class CodecError(RecorderError, ValueError):
    """A blob is truncated, corrupt, or not one of ours."""


class MissingParentError(RecorderError, LookupError):
    """Records were given to `assemble` without the record that they continue."""


class CollateError(RecorderError, ValueError):
    """Experiences cannot be put into one batch."""


class ExportError(RecorderError, ValueError):
    """Experiences cannot be given to a trainer as they are; the message says the way out."""


class StoreClosedError(RecorderError, RuntimeError):
    """A record store was used after `close()`."""


class StoreFileError(RecorderError, OSError):
    """A file cannot be the record store: it is damaged, something else's, or in use."""


class NotSavedError(RecorderError, RuntimeError):
    """What a call changed is in effect, but not on the store's disk; a crash would undo it."""


class LeaseError(RecorderError, LookupError):
    """A lease is unknown, already acknowledged, or has run out."""


class ClientError(RecorderError):
    """A call to a server's `/records` failed."""

    url: str = ""
    """The server that failed; empty where several were asked."""
    status: int | None = None
    """The HTTP status of its answer; None where it gave none."""
    failures: tuple[RecorderError, ...] = ()
    """Where several servers were asked: the error of each that failed."""
    elsewhere: str = ""
    """What became of the call on the others, in words; empty where there is none."""


class ServerUnreachableError(ClientError):
    """The server did not answer: wrong address, not running, or timed out."""


class NotAuthorizedError(ClientError):
    """The server wants another admin key, or none was given."""


class BadRequestError(ClientError):
    """The server refused the request as malformed."""


class ServerFaultError(ClientError):
    """The server answered, but not with what the protocol says."""


class NothingRecordedError(RecorderError, LookupError):
    """A run, or a generation of a run, is not recorded."""


class RunnerLostError(RecorderError):
    """The process that carried a run out ended, or no longer answered."""


class BatchAbandonedError(RecorderError, LookupError):
    """A batch was given up, and nothing more comes of it."""


class UnsupportedEngineError(RecorderError, RuntimeError):
    """The engine, its version or its configuration cannot be recorded."""


class MissingKeyError(RecorderError, LookupError):
    """A generation was started where no record key is in force, and every one must have one."""


class NotRecordedError(RecorderError, RuntimeError):
    """A generation could not be recorded, and its caller asked to be told."""
