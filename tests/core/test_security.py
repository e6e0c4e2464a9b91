"""The table of docs/security.md: each row, on the real routes and middleware, in each setting."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI

from recorder_core import FinishReason, Recorder, RecordKey, Turn
from recorder_core.context import MISSING, current_identity
from recorder_core.keys import sign
from recorder_core.server import AdminGuard, IdentityMiddleware, PreflightGuard, records_router
from tests.core.client.servers import serving

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
ADMIN_KEY = "the-admin-key-of-the-tests"
SECRET = "a secret that the tests know, and no agent"
SETTINGS = ("nothing set", "admin key", "secret", "both")
MINE = RecordKey("0", "mine", 0)
ANOTHERS = RecordKey("0", "anothers", 0)


class Engine(NamedTuple):
    """An engine's server, started with some of the secrets."""

    recorder: Recorder
    http: httpx.Client

    def generate(self, key: RecordKey, **headers: str) -> str:
        """What comes of a generation that is to be recorded under a key."""
        before = self.recorder.stats()
        held = self._records(key)
        reply = self.http.post("/v1/completions", headers=headers)
        assert reply.json() == {"ids": [7, 8]}  # served, whatever the key
        self.recorder.flush()
        after = self.recorder.stats()
        if after.recorded > before.recorded:
            assert after.unkeyed == before.unkeyed
            assert self._records(key) == held + 1
            return "recorded"
        assert self._records(key) == held
        (reason,) = (
            name
            for name, count in after.unkeyed.items()
            if count == before.unkeyed.get(name, 0) + 1
        )
        return f"`{reason}`"

    def _records(self, key: RecordKey) -> int:
        return sum(len(run.records) for run in self.recorder.store.get(key))

    def ask(self, **headers: str) -> str:
        """What comes of asking for records, rewarding, draining and deleting."""
        calls: list[tuple[str, str, Any]] = [
            ("GET", "/records/keys?prefix=", None),
            ("GET", "/records?prefix=absent", None),
            ("PATCH", "/records", {"key": str(MINE), "reward": 1.0}),
            ("POST", "/records/drain", {"prefix": "absent"}),
            ("POST", "/records/block", {"prefix": "absent"}),
            ("POST", "/records/forget", {"prefixes": ["absent"]}),
            ("DELETE", "/records?prefix=absent", None),
            ("GET", "/records/stats", None),
        ]
        found = {
            self.http.request(method, path, json=body, headers=headers).status_code
            for method, path, body in calls
        }
        answers = {"answered" if status in (200, 204) else str(status) for status in found}
        (answer,) = answers
        return answer


def application(recorder: Recorder, admin_key: str | None, secret: str | None) -> Any:
    app = FastAPI()
    guard = AdminGuard(admin_key)
    app.include_router(records_router(recorder, guard=guard))

    @app.post("/v1/completions")
    async def complete() -> dict[str, Any]:
        identity = current_identity() or MISSING
        if identity.key is None:
            recorder.count_unkeyed(identity.reason, identity.detail)
        else:
            recorder.submit(
                Turn(
                    key=identity.key,
                    prompt_ids=[1],
                    response_ids=[7, 8],
                    logprobs=[-0.5, -0.25],
                    finish_reason=FinishReason.STOP,
                    created_at=time.time(),
                    finished_at=time.time(),
                )
            )
        return {"ids": [7, 8]}

    return IdentityMiddleware(PreflightGuard(app, guard), ["engine-key"], secret)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """A server for each setting."""
    with ExitStack() as stack:
        found = {}
        for setting in SETTINGS:
            recorder = Recorder()
            stack.callback(recorder.close)
            admin_key = ADMIN_KEY if setting in ("admin key", "both") else None
            secret = SECRET if setting in ("secret", "both") else None
            url = stack.enter_context(serving(application(recorder, admin_key, secret)))
            http = stack.enter_context(httpx.Client(base_url=url, trust_env=False))
            found[setting] = Engine(recorder, http)
        yield found


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def mine() -> str:
    return sign(MINE, SECRET, 60)


def later() -> str:
    key, _, signature = mine().rpartition("~")
    expiry, _, mac = signature.partition(".")
    return f"{key}~{int(expiry) + 3600}.{mac}"


def over() -> str:
    return sign(MINE, SECRET, 60, now=time.time() - 61)


PROXY = {"x-forwarded-for": "127.0.0.1"}
ROWS: dict[str, Callable[[Engine], str]] = {
    "an agent generates with its run's plain key": lambda engine: engine.generate(
        MINE, **bearer(str(MINE))
    ),
    "an agent generates with another run's plain key": lambda engine: engine.generate(
        ANOTHERS, **bearer(str(ANOTHERS))
    ),
    "an agent generates with its run's signed key": lambda engine: engine.generate(
        MINE, **bearer(mine())
    ),
    "an agent generates with its signed key in `X-Record-Key`": lambda engine: engine.generate(
        MINE, **{"x-record-key": mine()}
    ),
    "an agent generates with its signature behind another run's key": lambda engine: (
        engine.generate(ANOTHERS, **bearer(f"{ANOTHERS}~{mine().rpartition('~')[2]}"))
    ),
    "an agent generates with a signature that it made itself": lambda engine: engine.generate(
        ANOTHERS, **bearer(sign(ANOTHERS, "what an agent takes for the secret", 60))
    ),
    "an agent generates with its signed key, its expiry changed": lambda engine: engine.generate(
        MINE, **bearer(later())
    ),
    "an agent generates with its signed key when its time is over": lambda engine: engine.generate(
        MINE, **bearer(over())
    ),
    "an agent generates without a key": lambda engine: engine.generate(MINE),
    "an agent on this machine asks `/records` with its plain key": lambda engine: engine.ask(
        **bearer(str(MINE))
    ),
    "an agent on this machine asks `/records` with its signed key": lambda engine: engine.ask(
        **bearer(mine())
    ),
    "a program on this machine asks `/records`": lambda engine: engine.ask(),
    "a proxy passes a request for `/records` on": lambda engine: engine.ask(**PROXY),
    "a web page of another site asks `/records`": lambda engine: engine.ask(
        origin="https://example.org"
    ),
    "who has the admin key asks `/records`, through a proxy": lambda engine: engine.ask(
        **bearer(ADMIN_KEY), **PROXY
    ),
    "who has the secret asks `/records` with it": lambda engine: engine.ask(**bearer(SECRET)),
    "who has the admin key generates with it as the API key": lambda engine: engine.generate(
        MINE, **bearer(ADMIN_KEY)
    ),
}


def table() -> dict[str, list[str]]:
    """The rows of the document, by what is tried."""
    text = DOCUMENT.read_text()
    _, _, rows = text.partition(f"| | {' | '.join(SETTINGS)} |\n")
    found = {}
    for line in rows.splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in re.split(r"\s*\|\s*", line.strip("| ")))
        found[name] = cells
    return found


def test_each_row_of_the_document_is_tested():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("row", ROWS)
def test_the_document_says_what_comes_of_it(engines, row, setting):
    assert ROWS[row](engines[setting]) == table()[row][SETTINGS.index(setting)]


@pytest.mark.parametrize("setting", ["secret", "both"])
@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_signed_key_goes_behind_the_engines_own(engines, setting, name):
    text = f"engine-key:{mine()}"
    headers = bearer(text) if name == "authorization" else {name: text}
    assert engines[setting].generate(MINE, **headers) == "recorded"


def test_a_forgery_beside_a_key_that_verifies_is_no_matter(engines):
    """The first that is one counts, as for plain keys."""
    headers = {"x-record-key": str(ANOTHERS), **bearer(mine())}
    assert engines["both"].generate(MINE, **headers) == "recorded"
    assert engines["both"].generate(ANOTHERS, **{**headers, **bearer(over())}) == "`expired`"
