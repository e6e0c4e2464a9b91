"""Which turn of its run a conversation goes on from.

An agent sends its history as text, and the text of sampled tokens, tokenised again, is often not
what was sampled. So the server keeps each turn's ids, found by its messages. A history that begins
with a turn's messages and the answer that was given to them goes on from that turn; its ids are
known, and need not be made from text.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from recorder_core.keys import RecordKey

MAX_TOKENS = 16_000_000
"""Tokens of the turns that are kept, over all runs; those used least recently go."""


class Turn(NamedTuple):
    """The ids of one answer, and of what it answered."""

    prompt_ids: array[int]
    response_ids: array[int]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.prompt_ids) + len(self.response_ids)


class Conversations:
    """The turns of the runs that are being served. Not to be used from two threads at once."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        # None: answers of other ids that the agent cannot tell apart.
        self._turns: OrderedDict[bytes, Turn | None] = OrderedDict()
        self._max_tokens = max_tokens
        self._tokens = 0

    def add(
        self,
        key: RecordKey,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        prompt_ids: Sequence[int],
        answers: Sequence[tuple[dict[str, Any], Sequence[int]]],
    ) -> None:
        """Keep the answers to the same messages: each as the agent got it, and its ids."""
        prompt = array("i", prompt_ids)
        for answer, ids in answers:
            name = _fingerprint(key, [*messages, answer], tools)
            turn = Turn(prompt, array("i", ids))
            known = self._turns.get(name, turn)
            if known is not None and name in self._turns:
                self._tokens -= known.tokens
            self._turns[name] = turn if known == turn else None
            self._turns.move_to_end(name)
            self._tokens += turn.tokens if known == turn else 0
        while self._tokens > self._max_tokens:
            _, oldest = self._turns.popitem(last=False)
            self._tokens -= oldest.tokens if oldest else 0

    def continued(
        self,
        key: RecordKey,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> tuple[Turn, int] | None:
        """The turn that messages go on from, and how many of them it covers.

        None where there is none, or more than one: which of several answers with the same text the
        agent means cannot be known.
        """
        answers = (n for n, each in enumerate(messages) if each.get("role") == "assistant")
        covered = max(answers, default=-1) + 1
        if not 0 < covered < len(messages):
            return None
        name = _fingerprint(key, messages[:covered], tools)
        turn = self._turns.get(name)
        if turn is None:
            return None
        self._turns.move_to_end(name)
        return turn, covered


def _fingerprint(
    key: RecordKey, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> bytes:
    text = json.dumps(
        [str(key), [_essence(each) for each in messages], tools or []], sort_keys=True
    )
    return hashlib.sha256(text.encode()).digest()


def _essence(message: dict[str, Any]) -> dict[str, Any]:
    """What of a message is rendered, however a client writes it down."""
    essence = {"role": message.get("role"), "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        essence["tool_calls"] = [
            [call.get("function", {}).get(name) for name in ("name", "arguments")] for call in calls
        ]
    if message.get("role") == "tool":
        essence["tool_call_id"] = message.get("tool_call_id")
    return essence
