"""How the command ends: its exit codes, and what it says instead of a traceback."""

from __future__ import annotations

from enum import IntEnum

from recorder_core.environment import ADMIN_KEY_VARIABLE, URL_VARIABLE
from recorder_core.errors import (
    ClientError,
    InvalidKeyError,
    NotAuthorizedError,
    NothingRecordedError,
    RecorderError,
    ServerUnreachableError,
)

_OF_THE_EXTRA = {"httpx", "rich", "shtab"}


class Exit(IntEnum):
    """The exit codes, which scripts may count on."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOTHING = 3
    """Nothing matched."""
    NOT_AUTHORIZED = 4
    UNREACHABLE = 5
    INTERRUPTED = 130


class CommandError(Exception):
    """The command cannot do what it was asked.

    Args:
        message: What was wrong, and what would be right: one line.
        code: How the command ends.
    """

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the midst of something that has to be told about.

    Args:
        message: What became of it.
    """


def command_error(error: Exception, *, key_from: str | None = None) -> CommandError | None:
    """What to say of an error; None for one that is a fault of ours.

    Args:
        error: What was raised.
        key_from: Where the admin key came from; None where none was given.
    """
    if isinstance(error, CommandError):
        return error
    if isinstance(error, ClientError):
        return _of_servers(error, key_from)
    if isinstance(error, InvalidKeyError):
        return CommandError(str(error), Exit.USAGE)
    if isinstance(error, NothingRecordedError):
        return CommandError(str(error), Exit.NOTHING)
    if isinstance(error, RecorderError):
        return CommandError(str(error))
    if isinstance(error, ImportError):
        return _of_import(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return CommandError(f"{where}{error.strerror}")
    return None


def _of_servers(error: ClientError, key_from: str | None) -> CommandError:
    """The errors of all servers that failed in one line; the first decides how the command ends."""
    each = error.failures or (error,)
    told = [_of_server(one, key_from) for one in each if isinstance(one, ClientError)]
    hints = {hint: None for _, hint, _ in told if hint}
    parts = [*(what for what, _, _ in told), *([error.elsewhere] if error.elsewhere else [])]
    return CommandError("; ".join(parts) + "".join(hints), told[0][2])


def _of_server(error: ClientError, key_from: str | None) -> tuple[str, str, Exit]:
    """What is wrong with a server, what to do about it, and the exit code."""
    if isinstance(error, ServerUnreachableError):
        hint = f". Is it started with --enable-recording? Else set {URL_VARIABLE}"
        return f"{error.url} does not answer ({_reason(error)})", hint, Exit.UNREACHABLE
    if isinstance(error, NotAuthorizedError) and error.status == 401:
        if key_from is None:
            hint = f": set {ADMIN_KEY_VARIABLE}"
            return f"{error.url} wants the admin key", hint, Exit.NOT_AUTHORIZED
        return f"{error.url} refuses the key in {key_from}", "", Exit.NOT_AUTHORIZED
    if error.status in (404, 405):
        hint = ": start it with --enable-recording"
        return f"{error.url} answers, but does not record", hint, Exit.FAILED
    code = Exit.NOT_AUTHORIZED if isinstance(error, NotAuthorizedError) else Exit.FAILED
    return str(error), "", code


def _reason(error: BaseException) -> str:
    """Why a server does not answer, in the words of the system."""
    at: BaseException | None = error
    while at is not None:
        if "Timeout" in type(at).__name__:
            return "no answer in time"
        if isinstance(at, OSError) and at.strerror:
            return at.strerror[:1].lower() + at.strerror[1:]
        at = at.__cause__ or at.__context__
    return str(error.__cause__ or error)


def _of_import(error: ImportError) -> CommandError:
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    name = (cause.name or "").partition(".")[0]
    if name in _OF_THE_EXTRA:
        what = f"this needs {name}, which is not installed"
        return CommandError(f"{what}: pip install 'recorder-core[cli]'")
    return CommandError(str(error))  # our own modules say which extra is missing
