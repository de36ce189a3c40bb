"""Function calls of a seed's assistant: context without labels, or the conversation cut."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from pipeline.conversations.conversation import Message, Reason
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.forms import RowSettings, read_row
from pipeline.conversations.template import ChatTemplate, for_template
from tests.conversations.scripted_target import END, SETTINGS, hold, only_row, written

CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
RESULT = '{"sky": "clear"}'
OFFERED = (
    '{"name": "weather", "description": "Says the weather.", "parameters": {"type": "object"}}'
)
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Weather in Paris?"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": RESULT},
        {"from": "gpt", "value": "Clear."},
        {"from": "human", "value": "Thanks!"},
        {"from": "gpt", "value": "Welcome."},
    ],
    "tools": f"[{OFFERED}]",
}
OPENAI = json.loads(
    """{"messages": [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "{\\"sky\\": \\"clear\\"}"},
    {"role": "assistant", "content": "Clear."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "Welcome."}
    ], "tools": [{"type": "function", "function": {"name": "weather",
        "description": "Says the weather.", "parameters": {"type": "object"}}}]}"""
)
# As Qwen's: calls in the answer, results as a user's turn, offers in the system prompt.
CALLING = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}\
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def conversation(row=SHAREGPT):
    return read_row(row, "s:0", RowSettings())


@pytest.fixture
def calling(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, CALLING)


@pytest.mark.parametrize("row", [SHAREGPT, OPENAI], ids=["llama-factory", "openai"])
def test_calls_and_results_are_read_in_both_spellings(row):
    found = conversation(row)
    roles = [message.role for message in found.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert found.messages[1:3] == (Message("assistant", "", f"[{CALL}]"), Message("tool", RESULT))
    assert json.loads(found.tools) == OPENAI["tools"]
    assert [turn.answer for turn in found.turns] == ["Clear.", "Welcome."]


def test_every_call_has_an_id_which_its_result_names():
    """Every text is marked, also within calls."""
    two = Message("assistant", "", f'[{CALL}, {{"name": "clock", "arguments": {{}}}}]')
    chat = [two, Message("tool", "one"), Message("tool", "six")] * 2
    given = for_template(chat, lambda text: text.replace("i", "1"))
    calls = [call for message in given for call in message.get("tool_calls", ())]
    ids = [call["id"] for call in calls]
    assert calls[0]["function"] == json.loads(CALL.replace("i", "1"))
    results = [message for message in given if message["role"] == "tool"]
    assert len(set(ids)) == len(ids) == 4
    assert [result["tool_call_id"] for result in results] == ids
    assert [result["content"] for result in results] == ["one", "s1x"] * 2


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("function_call", "", Reason.BROKEN_JSON),
        ("function_call", "[" * 100_000, Reason.BROKEN_JSON),
        ("function_call", '{"arguments": {}}', Reason.NOT_TEXT),
        ("observation", "", Reason.EMPTY),
        ("human", "Rain?", Reason.WRONG_ORDER),
    ],
)
def test_a_broken_call_or_result_rejects_its_row(name, value, reason):
    turns = list(SHAREGPT["conversations"])
    place = {"human": 1, "function_call": 1, "observation": 2}[name]
    turns[place] = {"from": name, "value": value}
    assert conversation({"conversations": turns}).reason is reason


@pytest.mark.parametrize("first", [0, 4], ids=["call-first", "call-later"])
def test_calls_and_results_are_context_between_the_answers(first, calling, tokenizer):
    turns = SHAREGPT["conversations"]
    seed = conversation({**SHAREGPT, "conversations": [*turns[first:], *turns[:first]]})
    dialogue = Dialogue(seed, calling, SETTINGS)
    requests = hold(dialogue, tokenizer, "Sunny.", "Bye.")
    row = only_row(dialogue)
    assert written(row, tokenizer) == [f"Sunny.{END}", f"Bye.{END}"]
    prompt = tokenizer.decode(requests[1 if first else 0].prompt_ids)
    assert '<tool_call>weather {"city": "Paris", "days": 2}</tool_call>' in prompt
    assert prompt.endswith(f"{RESULT}</tool_response>{END}\n<|im_start|>assistant\n")
    text = tokenizer.decode(row.input_ids)
    assert "Says the weather." in text and "Clear." not in text and text.count("<tool_call>") == 1
    reference = calling.variant(tools=seed.tools).render(row.messages, asks=False)
    assert reference.startswith(text)


def test_a_template_without_functions_ends_the_conversation_before_them(chatml, tokenizer):
    assert not chatml.renders_tools
    dialogue = Dialogue(conversation(), chatml, SETTINGS)
    hold(dialogue, tokenizer, "It is sunny.", "never asked")
    row = only_row(dialogue)
    assert dialogue.cut_at_tools
    assert [message.role for message in row.messages] == ["user", "assistant"]


def test_a_template_of_one_call_ends_a_conversation_before_two(tokenizer):
    """Llama 3.1's template is one."""
    two_calls = "m.tool_calls and m.tool_calls | length > 1"
    picky = "{% if " + two_calls + " %}{{ raise_exception('one call at a time') }}{% endif %}"
    template = ChatTemplate(tokenizer, CALLING.replace("<|im_start|>{{", picky + "<|im_start|>{{"))
    two = copy.deepcopy(SHAREGPT)
    two["conversations"][1]["value"] = f"[{CALL}, {CALL}]"
    for row, num_answers in ((SHAREGPT, 2), (two, 1)):
        dialogue = Dialogue(conversation(row), template, SETTINGS)
        hold(dialogue, tokenizer, "Sunny.", "Bye.")
        assert dialogue.cut_at_tools == (row is two)
        assert len(only_row(dialogue).spans) == num_answers


def test_self_talk_and_passthrough_skip_tool_calls(calling, tokenizer):
    talk = Dialogue(conversation(), calling, replace(SETTINGS, mode="self-talk", rounds=1))
    assert "<tool_call>" not in tokenizer.decode(talk.next_request().prompt_ids)
    row = only_row(Dialogue(conversation(), calling, replace(SETTINGS, mode="passthrough")))
    assert written(row, tokenizer) == [f"Clear.{END}", f"Welcome.{END}"]
