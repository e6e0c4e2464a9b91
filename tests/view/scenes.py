"""What the page is shown: `/records` on a real server, and runs as agents cause them."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from typing_extensions import Self

from recorder_core import KeyPrefix, RecordKey, Turn
from recorder_core.exchange import Exchange
from recorder_core.recent import Recent
from recorder_core.recorder import Recorder
from recorder_core.records import Sampling
from recorder_core.server import AdminGuard, IdentityMiddleware, PreflightGuard, records_router
from recorder_core.stores import MemoryStore

_WORDS = re.compile(r"<\|?\w+\|?>| ?[A-Za-z]+|\d|\n|[\x00-\x7f]|[^\x00-\x7f]")


class Vocabulary:
    """Token ids as byte-level tokenizers give them: words, and of rare characters their bytes."""

    def __init__(self) -> None:
        self._ids = {bytes([byte]): byte for byte in range(256)}
        self._pieces = dict(enumerate(self._ids))

    def encode(self, text: str) -> list[int]:
        return [self._id(part) for word in _WORDS.findall(text) for part in _parts(word)]

    def _id(self, piece: bytes) -> int:
        found = self._ids.setdefault(piece, len(self._ids))
        self._pieces[found] = piece
        return found

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [self._pieces.get(each, b"") for each in ids]


def _parts(word: str) -> list[bytes]:
    data = word.encode("utf-8", "surrogatepass")
    if len(data) == 4 and not word.isascii():  # an emoji: two tokens, one character
        return [data[:2], data[2:]]
    return [data]


class Engine:
    """A recorder, and the server that an engine would be.

    Args:
        admin_key: What `/records` asks for.
        recent_bytes: Memory for drained runs.
        pieces: Whether it has a tokenizer.
        port: Where it listens; 0: anywhere.
    """

    def __init__(
        self,
        admin_key: str | None = None,
        *,
        recent_bytes: int = 64 * 1024**2,
        pieces: bool = True,
        port: int = 0,
    ) -> None:
        self.recorder = Recorder(MemoryStore(recent=Recent(recent_bytes)))
        self.vocabulary = Vocabulary()
        self._random = random.Random(7)
        self.now = time.time() - 600
        guard = AdminGuard(admin_key)
        app = FastAPI()
        app.include_router(
            records_router(
                self.recorder, guard=guard, pieces=self.vocabulary.pieces if pieces else None
            )
        )
        app.add_middleware(PreflightGuard, guard=guard)
        app.add_middleware(IdentityMiddleware)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
        self.recorder.close()

    # What agents do.

    def generate(
        self,
        key: str,
        prompt: str | Sequence[int],
        response: str | Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        **fields: Any,
    ) -> list[int]:
        """A finished generation; returns its path, which a next prompt begins with."""
        prompt_ids = self.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
        ids = self.vocabulary.encode(response) if isinstance(response, str) else list(response)
        text = response if isinstance(response, str) else None
        # One after another, each as long as it takes: what ended later is no parent.
        begun = self.now + 0.05
        self.now = begun + 0.01 * len(ids)
        given = {
            "finish_reason": "stop",
            "created_at": begun,
            "finished_at": self.now,
            "response_text": text,
            "exchange": delivered(),
            "logprobs": self._logprobs(len(ids)) if logprobs is None else logprobs,
        }
        turn = Turn(
            key=RecordKey.parse(key), prompt_ids=prompt_ids, response_ids=ids, **{**given, **fields}
        )
        self.recorder.submit(turn)
        self.recorder.flush()
        return [*prompt_ids, *ids]

    def submit(self, key: str, prompt: list[int], response: list[int]) -> None:
        """A generation in brief, one of many."""
        self.recorder.submit(
            Turn(
                key=RecordKey.parse(key),
                prompt_ids=prompt,
                response_ids=response,
                logprobs=[-0.5] * len(response),
                finish_reason="stop",
                finished_at=time.time(),
            )
        )

    def then(self, path: list[int], text: str) -> list[int]:
        """A prompt that goes on with what the environment said."""
        return [*path, *self.vocabulary.encode(text)]

    def _logprobs(self, count: int) -> list[float]:
        return [-min(self._random.expovariate(3.0) ** 2, 14.0) for _ in range(count)]

    def reward(self, key: str, reward: float) -> None:
        self.recorder.store.update(RecordKey.parse(key), reward=reward)

    def drain(self, prefix: str = "") -> None:
        """A trainer takes all runs there, and has them safe."""
        where = KeyPrefix(prefix)
        name = f"lease {time.monotonic_ns()}"
        self.recorder.after(lambda: self.recorder.store.drain(where, name, 60)).result()
        self.recorder.after(lambda: self.recorder.store.ack(name)).result()


def delivered() -> Exchange:
    """The HTTP exchange of a reply that was sent to its end."""
    exchange = Exchange()
    exchange.delivered = True
    return exchange


SYSTEM = (
    "<|system|>\nYou are a careful assistant with one tool, `search`. Think first, then act. "
    "Answer in one word.\n<|user|>\nWhich city was the capital of Brazil before Brasilia?\n"
    "<|assistant|>\n"
)
THOUGHT = (
    "<think>\nThe user wants the capital before 1960. I believe it was Rio de Janeiro, though I "
    "could be wrong: Salvador came first 🤖. Let me look it up.\n</think>\n"
    '{"tool": "search", "query": "capital of Brazil before 1960"}<|end|>'
)
RESULT = (
    "\n<|tool|>\n[1] Salvador was the first capital (1549 to 1763). [2] From 1763 until 1960 the "
    "capital was Rio de Janeiro. العاصمة القديمة كانت ريو دي جانيرو\n<|assistant|>\n"
)
ANSWERS = [
    "The second result says it plainly: 1763 until 1960.\nRio de Janeiro<|end|>",
    "The first result says Salvador, so I go with that.\nSalvador<|end|>",
    "I am not certain, but São Paulo is the largest city 🎉.\nSão Paulo<|end|>",
]


STORY = "0/capital-3/1"
"""The run with all that there is."""


def tell(engine: Engine, tasks: int = 6, runs: int = 8) -> None:
    """A batch as an agent with a tool makes it: branches, retries, new weights, some drained."""
    chance = random.Random(3)
    for task in range(tasks):
        for run in range(runs):
            key = f"0/capital-{task}/{run}"
            if key == STORY:
                continue
            episode(engine, key, chance)
            solved = task == 2 or chance.random() < 0.55
            if not (task == 5 and run == 7):
                engine.reward(key, 1.0 if solved else round(chance.choice([0.0, 0.0, 0.2, 0.5]), 2))
        if task == 0:
            engine.drain("0/capital-0")
    story(engine, STORY)
    engine.reward(STORY, 0.2)


def episode(engine: Engine, key: str, chance: random.Random) -> None:
    """Two turns, with a tool's result between them."""
    versions = "41" if chance.random() < 0.6 else "42"
    path = engine.generate(key, SYSTEM, THOUGHT, **_weights(engine, THOUGHT, versions), **_how())
    answer = chance.choice(ANSWERS)
    finish = "abort" if chance.random() < 0.06 else "length" if chance.random() < 0.08 else "stop"
    prompt = engine.then(path, RESULT)
    engine.generate(
        key, prompt, answer, finish_reason=finish, **_weights(engine, answer, "42"), **_how()
    )


def story(engine: Engine, key: str) -> None:
    """A run with all that there is: branches, a retry, a broken prefix, an abort, two versions."""
    path = engine.generate(key, SYSTEM, THOUGHT, **_weights(engine, THOUGHT, "41"), **_how())
    prompt = engine.then(path, RESULT)
    count = len(engine.vocabulary.encode(ANSWERS[1]))
    half = count // 2
    path = engine.generate(
        key, prompt, ANSWERS[1], versions=[(0, half, "41"), (half, count, "42")], **_how()
    )
    again = engine.then(
        path, "\n<|user|>\nAre you sure? Look at the dates once more.\n<|assistant|>\n"
    )
    engine.generate(key, again, ANSWERS[0], **_weights(engine, ANSWERS[0], "42"), **_how())
    other = engine.then(path, "\n<|user|>\nPlease answer in Arabic.\n<|assistant|>\n")
    lost = Exchange()
    lost.delivered = False
    arabic = "ريو دي جانيرو<|end|>"
    engine.generate(key, other, arabic[:8], finish_reason="abort", exchange=lost, **_how())
    engine.generate(key, other, arabic, attempt=1, **_weights(engine, arabic, "42"), **_how())
    rendered = SYSTEM + THOUGHT.replace("\n</think>\n", "</think>") + RESULT
    engine.generate(key, rendered, ANSWERS[2], **_weights(engine, ANSWERS[2], "42"), **_how())


def _weights(engine: Engine, text: str, version: str) -> dict[str, Any]:
    return {"versions": [(0, len(engine.vocabulary.encode(text)), version)]}


def _how() -> dict[str, Any]:
    return {"sampling": Sampling(temperature=1.0, logprobs_mode="raw_logprobs")}


def long_run(engine: Engine, key: str, tokens: int) -> None:
    """One trajectory of so many tokens, in two turns."""
    words = engine.vocabulary.encode(" the quick brown fox\n jumps over a lazy dog 🤖")
    ids = np.resize(np.array(words, dtype=np.int32), tokens // 2)
    path = engine.generate(key, "<|user|>\n", ids.tolist())
    engine.generate(key, engine.then(path, "\n<|user|>\nGo on.\n"), ids.tolist())
