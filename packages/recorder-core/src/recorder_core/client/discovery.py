"""Replicas whose addresses are looked up each time: in a file, or under a DNS name with several."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote

import httpx

from recorder_core.errors import ServerUnreachableError

logger = logging.getLogger(__name__)

Lookup = Callable[[], Sequence[str]]
"""Gives base URLs."""

_TTL_S = 5.0
"""How long an answer of the DNS is used."""


def lookup(url: str) -> Lookup | None:
    """What finds the replicas that a URL stands for; None if it is a replica's own.

    Args:
        url: `file:///path` of a file with a base URL in each line, or `dns+http://name:8000`, which
            stands for every address that the name has.

    Raises:
        ValueError: The file cannot be read or names no replica, or the URL lacks a name or port.
    """
    scheme = url.partition("://")[0]
    if scheme == "file":
        return FileReplicas(Path("/" + unquote(url.partition("://")[2]).lstrip("/")))
    if scheme == "dns+http":
        parsed = httpx.URL(url.removeprefix("dns+"))
        if not parsed.host or parsed.port is None:
            raise ValueError(f"{url!r} is not like dns+http://name:8000")
        return NamedReplicas(parsed.host, parsed.port)
    return None


class FileReplicas:
    """Base URLs in a file, one in each line; empty lines and those after a `#` are left out.

    Args:
        path: The file. Where it cannot be read later, or is empty, what it said last stays.

    Raises:
        ValueError: It cannot be read now, or names no replica.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = self._read()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        if not self._known:
            raise ValueError(f"{path} names no replica; write a base URL in each line")

    def _read(self) -> list[str]:
        lines = (line.partition("#")[0].strip() for line in self._path.read_text().splitlines())
        return [line for line in lines if line]

    def __call__(self) -> Sequence[str]:
        """The base URLs now."""
        try:
            found = self._read()
        except OSError as error:
            logger.warning("%s cannot be read (%s): what it said last stays", self._path, error)
            found = []
        self._known = found or self._known
        return self._known


class NamedReplicas:
    """Every address of a DNS name, e.g. of a headless service.

    Args:
        name: The name. Where it cannot be looked up, the last answer stays.
        port: Of every replica.
    """

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._known: list[str] = []
        self._asked_at = float("-inf")

    def __call__(self) -> Sequence[str]:
        """The base URLs now.

        Raises:
            ServerUnreachableError: The name has no address, and never had.
        """
        if time.monotonic() - self._asked_at < _TTL_S:
            return self._known
        try:
            found = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._known:
                raise ServerUnreachableError(f"{self._name} has no address: {error}") from None
            logger.warning("%s was not looked up (%s): the last answer stays", self._name, error)
            return self._known
        hosts = sorted({str(address[0]) for *_, address in found})
        self._known = [
            f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"
            for host in hosts
        ]
        self._asked_at = time.monotonic()
        return self._known
