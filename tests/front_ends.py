"""Several processes that serve one engine: a connection to each of them, and their recorder."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import psutil

from examples.engine_server import EngineServer
from tests.streams import events


class FrontEnd:
    """One of the processes, over a connection that the kernel has dealt to it.

    Args:
        server: The server that they are of.
        process: Which it is.
        admin_key: What its `/records` wants.
        free: A path that costs the server nothing.
    """

    def __init__(
        self, server: EngineServer, process: psutil.Process, admin_key: str, free: str = "/health"
    ) -> None:
        self._server = server
        self._process = process
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self._free = free
        self._http: httpx.Client | None = None

    def connected(self) -> httpx.Client:
        """A client whose one connection is to this process."""
        while self._http is None or not self._has(self._http):
            self.close()
            # Without certificates, which take longer to load than the rest.
            self._http = httpx.Client(base_url=self._server.base_url, timeout=120, verify=False)
        return self._http

    def _has(self, http: httpx.Client) -> bool:
        http.get(self._free)
        (connection,) = http._transport._pool.connections
        port = connection._connection._network_stream.get_extra_info("client_addr")[1]
        return any(
            each.raddr.port == port for each in self._process.net_connections() if each.raddr
        )

    def close(self) -> None:
        """End the connection."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def post(self, path: str, body: dict[str, Any], key: str) -> Any:
        """What it answers to a request with a key."""
        headers = {"Authorization": f"Bearer {key}"}
        response = self.connected().post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(
        self, path: str, body: dict[str, Any], key: str, pieces: int | None = None
    ) -> list[dict[str, Any]]:
        """The events of a streamed answer; after so many `pieces` the client leaves."""
        headers, body = {"Authorization": f"Bearer {key}"}, {**body, "stream": True}
        with self.connected().stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            return list(itertools.islice(events(response), pieces))

    def records(self, path: str) -> httpx.Response:
        """What it answers to a question about records."""
        return self.connected().get(f"/records/{path}", headers=self._admin)


def recorder_process(server: EngineServer) -> psutil.Process | None:
    """The recorder process of a server's front ends, if it is there."""
    for child in psutil.Process(server.pid).children():
        if "recorder_core.host" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
            return child
    return None


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, be it that nobody has asked how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
