"""From messages to ids and back; no server is needed."""

from __future__ import annotations

from typing import Any

import pytest

from recorder_core import RecordKey
from tests.models import tiny_qwen3_float32
from tinker_recorder.serve.conversations import Conversations
from tinker_recorder.serve.errors import APIError
from tinker_recorder.serve.rendering import Rendering, plain_messages

KEY, OTHER = RecordKey.parse("0/chat/1"), RecordKey.parse("0/chat/2")
QWEN3 = '{"name": "qwen3", "enable_thinking": false}'
USER: dict[str, Any] = {"role": "user", "content": "The licence?"}
MORE: dict[str, Any] = {"role": "user", "content": "And then?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_qwen3_float32())


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_model_that_is_not_known_is_rendered_by_its_own_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    expected = tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert Rendering(tokenizer).chat(None, messages, [TOOL]) == list(expected)


def test_ids_whose_text_would_not_give_them_back_are_kept(tokenizer: Any) -> None:
    rendering = Rendering(tokenizer, QWEN3)
    prompt = rendering.chat(KEY, [USER], None)
    text = "licence"
    once, twice = tokenizer.encode(text), [tokenizer.encode(letter)[0] for letter in text]
    assert once != twice
    assert rendering.decode(once) == rendering.decode(twice) == text
    rendering.remember(KEY, [USER], None, prompt, [(answer(text), twice)])
    continued = rendering.chat(KEY, [USER, answer(text), MORE], None)
    assert continued[: len(prompt) + len(twice)] == [*prompt, *twice]


def test_another_run_is_not_continued(tokenizer: Any) -> None:
    rendering = Rendering(tokenizer, QWEN3)
    letters = [tokenizer.encode(letter)[0] for letter in "licence"]
    prompt = rendering.chat(KEY, [USER], None)
    rendering.remember(KEY, [USER], None, prompt, [(answer("licence"), letters)])
    history = [USER, answer("licence"), MORE]
    assert rendering.chat(OTHER, history, None) == Rendering(tokenizer, QWEN3).chat(
        None, history, None
    )


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        pytest.param([USER, answer("other"), MORE], None, id="another answer"),
        pytest.param([MORE, answer("yes"), MORE], None, id="another question"),
        pytest.param([USER, answer("yes"), MORE], [TOOL], id="other tools"),
        pytest.param([USER, answer("yes")], None, id="nothing new"),
        pytest.param([USER], None, id="no answer yet"),
    ],
)
def test_a_history_that_differs_goes_on_from_nothing(messages: Any, tools: Any) -> None:
    known = Conversations()
    known.add(KEY, [USER], None, [1, 2], [(answer("yes"), [3])])
    assert known.continued(KEY, messages, tools) is None
    going_on = known.continued(KEY, [USER, answer("yes"), MORE], None)
    assert going_on is not None
    turn, covered = going_on
    assert (turn.prompt_ids.tolist(), turn.response_ids.tolist(), covered) == ([1, 2], [3], 2)


def test_answers_of_equal_text_and_other_ids_are_not_told_apart_by_guessing() -> None:
    known = Conversations()
    known.add(KEY, [USER], None, [1, 2], [(answer("yes"), [3, 4]), (answer("yes"), [5])])
    known.add(KEY, [USER], None, [1, 2], [(answer("no"), [6])])
    assert known.continued(KEY, [USER, answer("yes"), MORE], None) is None
    assert known.continued(KEY, [USER, answer("no"), MORE], None) is not None


def test_the_memory_of_conversations_is_bounded() -> None:
    known = Conversations(max_tokens=10)
    for number in range(100):
        known.add(KEY, [USER], None, [1, 2], [(answer(str(number)), [3])])
    kept = [n for n in range(100) if known.continued(KEY, [USER, answer(str(n)), MORE], None)]
    assert kept == [97, 98, 99]


def test_text_parts_are_joined_and_nulls_left_out() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_messages([{"role": "user", "content": parts, "name": None}]) == [
        {"role": "user", "content": "ab"}
    ]


def test_messages_that_a_template_refuses_are_the_callers_fault(tokenizer: Any) -> None:
    with pytest.raises(APIError, match="rendered"):
        Rendering(tokenizer).chat(
            None, [{"role": "assistant", "content": "", "tool_calls": 5}], None
        )


def test_what_looks_like_a_call_and_is_none_stays_text(tokenizer: Any) -> None:
    """And the text before it was parsed has the markup of either.

    E11.
    """
    rendering = Rendering(tokenizer, QWEN3)
    prompt = rendering.chat(None, [USER], [TOOL])
    good = tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    bad = tokenizer.encode("so <tool_call>\n{broken\n</tool_call>")
    called = rendering.parse(prompt, good, [TOOL], [])
    assert called.content == ""
    assert called.text == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert called.tool_calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    shown = rendering.parse(prompt, bad, [TOOL], [])
    assert shown.tool_calls == ()
    assert "{broken" in shown.content
    assert shown.text == "so <tool_call>\n{broken\n</tool_call>"
