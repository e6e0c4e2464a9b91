"""Between messages and token ids: the `renderers` package, or the model's own chat template."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from renderers import create_renderer
from renderers.base import ToolCallParseStatus
from renderers.configs import config_from_name

from recorder_core.keys import RecordKey
from tinker_recorder.serve.conversations import Conversations
from tinker_recorder.serve.errors import APIError

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Answer(NamedTuple):
    """What an agent is shown of a response."""

    text: str
    """The response as text, before it was parsed; cut off like the content."""
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    stop_string: str | None = None
    """The stop string that cut the content off."""


class Rendering:
    """Renders prompts and parses responses of one model; callable from any thread.

    Args:
        tokenizer: The model's.
        renderer: A renderer's name, its configuration as JSON with a `name`, or `auto`: the
            renderer of the model where the package knows it, else its Hugging Face chat template.
    """

    def __init__(self, tokenizer: Any, renderer: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.renderer = create_renderer(tokenizer, _config(renderer))
        self._conversations = Conversations()
        self._lock = threading.Lock()  # fast tokenizers are not to be shared between threads
        eos = tokenizer.eos_token_id
        stops = [*self.renderer.get_stop_token_ids(), *([] if eos is None else [eos])]
        self.stop_ids = list(dict.fromkeys(stops))

    def chat(self, key: RecordKey | None, messages: Messages, tools: Tools) -> list[int]:
        """The prompt of a conversation.

        Where the conversation goes on from a turn of the same key, and the renderer can, its ids
        are those of that turn, sampled ones included, and new ones after them.

        Args:
            key: The run.
            messages: As `plain_messages` makes them.
            tools: OpenAI's tools.

        Raises:
            APIError: The messages cannot be rendered.
        """
        with self._lock:
            try:
                going_on = key and self._conversations.continued(key, messages, tools)
                if going_on:
                    turn, covered = going_on
                    bridged = self.renderer.bridge_to_next_turn(
                        turn.prompt_ids.tolist(),
                        turn.response_ids.tolist(),
                        messages[covered:],
                        tools=tools,
                    )
                    if bridged is not None:
                        return list(bridged.token_ids)
                ids = self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            except Exception as error:
                # Templates raise what they like, and it is the messages that they do not like.
                raise APIError(
                    f"the messages cannot be rendered: {error}", param="messages"
                ) from error
        return list(ids)

    def text(self, text: str) -> list[int]:
        """The ids of a prompt that is text."""
        with self._lock:
            return list(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        with self._lock:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _sampled_text(self, ids: list[int]) -> str:
        """The text with its markup, which may be special tokens; without the stop token."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        with self._lock:
            return str(self.tokenizer.decode(ids[:-1] if ended else ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        with self._lock:
            return [str(self.tokenizer.decode([token])) for token in ids]

    def complete(self, ids: Sequence[int], stops: Sequence[str]) -> Answer:
        """What a plain completion shows."""
        text, stopped = _cut(self.decode(ids), stops)
        return Answer(text, text, stop_string=stopped)

    def parse(
        self, prompt_ids: list[int], ids: list[int], tools: Tools, stops: Sequence[str]
    ) -> Answer:
        """What a chat completion shows: content, reasoning and tool calls."""
        with self._lock:
            parsed = self.renderer.parse_response(ids, tools=tools, prompt_ids=prompt_ids)
        content = parsed.content
        calls = []
        for call in parsed.tool_calls:
            if call.status is not ToolCallParseStatus.OK or call.name is None or not tools:
                content += call.raw  # what is no call is text, and not lost
                continue
            arguments = call.arguments
            calls.append(
                {
                    "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": arguments
                        if isinstance(arguments, str)
                        else json.dumps(arguments or {}, ensure_ascii=False),
                    },
                }
            )
        content, stopped = _cut(content, stops)
        text, _ = _cut(self._sampled_text(ids), [stopped] if stopped else [])
        shown = () if stopped else tuple(calls)
        return Answer(text, content, parsed.reasoning_content, shown, stopped)

    def remember(
        self,
        key: RecordKey,
        messages: Messages,
        tools: Tools,
        prompt_ids: list[int],
        answers: Sequence[tuple[dict[str, Any], list[int]]],
    ) -> None:
        """Keep what was sampled, for the turns that continue it."""
        with self._lock:
            self._conversations.add(key, messages, tools, prompt_ids, answers)


def _config(renderer: str) -> Any:
    fields = json.loads(renderer) if renderer.startswith("{") else {"name": renderer}
    config = config_from_name(fields.get("name", "auto"))
    if config is None:
        return None
    return type(config)(**fields)


def plain_messages(messages: Messages) -> Messages:
    """The messages as templates expect them: no nulls, and their text parts joined.

    Raises:
        APIError: A part is no text, or a message has no role.
    """
    plain = []
    for number, message in enumerate(messages):
        message = {name: value for name, value in message.items() if value is not None}
        if not isinstance(message.get("role"), str):
            raise APIError("a message wants a role", param=f"messages[{number}].role")
        content = message.get("content", "")
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise APIError(
                    "only text can be sampled from: another kind of content part was given",
                    param=f"messages[{number}].content",
                )
            content = "".join(part["text"] for part in content)
        message["content"] = content
        plain.append(message)
    return plain


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop
