"""Functions that a seed's assistant calls: context that no head learns from, or the conversation
cut, or left out.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken

from pipeline.conversations.conversation import Conversation, Message, Reason
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.forms import RowSettings, read_row
from pipeline.conversations.special_text import for_template
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError
from tests.conversations.scripted_target import SETTINGS, hold, ids_of, only_row, written

CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
RESULT = '{"sky": "clear"}'
DEEP = '{"name": "f", "arguments": ' + "[" * 200 + "]" * 200 + "}"
OFFERED = [
    {"name": "weather", "description": "Says the weather.", "parameters": {"type": "object"}}
]
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Weather in Paris?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": RESULT},
        {"from": "gpt", "value": "Clear."},
        {"from": "human", "value": "Thanks!"},
        {"from": "gpt", "value": "Welcome."},
    ],
    "tools": json.dumps(OFFERED),
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps(CALL["arguments"])},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "assistant", "content": "Clear."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Welcome."},
    ],
    "tools": [{"type": "function", "function": OFFERED[0]}],
}
# As Qwen's: calls in the answer, results as a user's turn, offers in the system prompt.
CALLING = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}\
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def conversation(row=SHAREGPT, **settings):
    return read_row(row, "s:0", RowSettings(**settings))


@pytest.fixture
def calling(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, CALLING)


@pytest.mark.parametrize("row", [SHAREGPT, OPENAI], ids=["llama-factory", "openai"])
def test_calls_and_results_are_read_in_both_spellings(row):
    found = conversation(row)
    assert [message.role for message in found.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert json.loads(found.messages[1].tool_calls) == [CALL] and found.messages[1].content == ""
    assert found.messages[2].content == RESULT
    assert json.loads(found.tools) == [{"type": "function", "function": OFFERED[0]}]
    assert [turn.answer for turn in found.turns] == ["Clear.", "Welcome."]


def test_the_character_limit_counts_calls():
    num_characters = sum(len(m.content) + len(m.tool_calls or "") for m in conversation().messages)
    assert isinstance(conversation(max_characters=num_characters), Conversation)
    assert conversation(max_characters=num_characters - 1).reason is Reason.TOO_LONG


def test_every_call_has_an_id_of_its_own_which_its_result_names():
    two = json.dumps([CALL, CALL | {"name": "clock"}])
    results = Message("tool", "one"), Message("tool", "two")
    said = for_template(
        [Message("assistant", "", two), *results, Message("assistant", "", two), *results], str
    )
    ids = [call["id"] for message in said for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 4
    assert [message["tool_call_id"] for message in said if message["role"] == "tool"] == ids
    assert [message["name"] for message in said if message["role"] == "tool"] == [
        "weather",
        "clock",
    ] * 2


def test_the_conversation_is_cut_before_a_call_or_left_out_where_that_is_wanted():
    assert conversation(tools="cut") == Conversation("s:0", (Message("user", "Weather in Paris?"),))
    assert conversation(tools="quarantine").reason is Reason.TOOLS
    no_call = {"conversations": SHAREGPT["conversations"][:1]}
    assert conversation(no_call, tools="quarantine") == conversation(no_call)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": ""}, Reason.EMPTY),
        ({"from": "function_call", "value": "weather(Paris)"}, Reason.BROKEN_JSON),
        ({"from": "function_call", "value": '{"arguments": {}}'}, Reason.NOT_TEXT),
        (
            {
                "from": "function_call",
                "value": '{"name": "f", "arguments": ' + "[" * 200 + "]" * 200 + "}",
            },
            Reason.BROKEN_JSON,
        ),
        ({"from": "observation", "value": ""}, Reason.EMPTY),
        ({"from": "observation", "value": None}, Reason.NOT_TEXT),
    ],
)
def test_a_turn_of_a_function_without_a_text_costs_its_row_alone_and_says_why(turn, reason):
    turns = [
        *SHAREGPT["conversations"][:2],
        {"from": "observation", "value": RESULT},
        *SHAREGPT["conversations"][3:],
    ]
    turns[1 if turn["from"] == "function_call" else 2] = turn
    refused = conversation({"conversations": turns})
    assert refused.reason is reason and refused.detail


def test_a_result_that_no_call_asks_for_is_refused():
    turns = [turn for turn in SHAREGPT["conversations"] if turn["from"] != "function_call"]
    assert conversation({"conversations": turns}).reason is Reason.WRONG_ORDER


def test_offers_that_are_no_functions_are_refused():
    for tools in ("get_weather(city)", [{"nameless": 1}], '["weather"]'):
        assert conversation(SHAREGPT | {"tools": tools}).reason in (
            Reason.BROKEN_JSON,
            Reason.NOT_TEXT,
        )
    for nothing in ("", "[]", None, []):
        assert conversation(SHAREGPT | {"tools": nothing}).tools is None


def test_in_a_replay_calls_and_results_are_context_and_the_target_answers_after_them(
    calling, tokenizer
):
    dialogue = Dialogue(conversation(), calling, SETTINGS)
    requests = hold(dialogue, tokenizer, "Sunny.", "Bye.")
    row = only_row(dialogue)
    assert len(requests) == 2 and written(row, tokenizer) == ["Sunny.<|im_end|>", "Bye.<|im_end|>"]
    prompt = tokenizer.decode(requests[0].prompt_ids)
    assert '<tool_call>weather {"city": "Paris", "days": 2}</tool_call>' in prompt
    assert prompt.endswith(
        f"<tool_response>{RESULT}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Says the weather." in prompt and "Clear." not in tokenizer.decode(row.input_ids)
    roles = [message.role for message in row.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    reference = calling.offering(conversation().tools).render(row.messages, asks=False)
    assert reference.startswith(tokenizer.decode(row.input_ids))


def test_a_call_in_a_later_turn_stands_between_the_answers(calling, tokenizer):
    later = {"conversations": [*SHAREGPT["conversations"][4:], *SHAREGPT["conversations"][:4]]}
    dialogue = Dialogue(conversation(later), calling, SETTINGS)
    hold(dialogue, tokenizer, "Bye.", "Sunny.")
    row = only_row(dialogue)
    text = tokenizer.decode(row.input_ids)
    assert (
        calling.render(row.messages, asks=False).startswith(text) and text.count("<tool_call>") == 1
    )
    assert written(row, tokenizer) == ["Bye.<|im_end|>", "Sunny.<|im_end|>"]


@pytest.mark.timeout(120)
def test_a_template_that_does_not_end_where_functions_are_called_is_stopped_and_refused(
    tokenizer, monkeypatch
):
    endless = "{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        tokenizer, "{% if messages[-1].role == 'tool' %}" + endless + "{% endif %}" + CALLING
    )
    monkeypatch.setattr("pipeline.conversations.template.PATIENCE", 0.1)
    with pytest.raises(ConfigError, match="more than"):
        _ = template.renders_tools


def test_where_the_template_cannot_render_functions_the_conversation_ends_before_them(
    chatml, tokenizer
):
    assert not chatml.renders_tools
    dialogue = Dialogue(conversation(), chatml, SETTINGS)
    hold(dialogue, tokenizer, "It is sunny.", "never asked")
    row = only_row(dialogue)
    assert dialogue.cut_at_tools and [message.role for message in row.messages] == [
        "user",
        "assistant",
    ]


def test_a_template_that_takes_one_call_at_a_time_ends_a_conversation_before_two(tokenizer):
    """As Llama 3.1's."""
    picky = CALLING.replace("<|im_start|>{{", "{% if m.tool_calls and m.tool_calls | length > 1 %}\\\n"  # noqa: E501
        "{{ raise_exception('one call at a time') }}{% endif %}<|im_start|>{{")  # fmt: skip
    template = ChatTemplate(tokenizer, picky)
    two = copy.deepcopy(SHAREGPT)
    two["conversations"][1]["value"] = json.dumps([CALL, CALL])
    for row, cut in ((SHAREGPT, False), (two, True)):
        dialogue = Dialogue(conversation(row), template, SETTINGS)
        hold(dialogue, tokenizer, "Sunny.", "Bye.")
        assert dialogue.cut_at_tools == cut and len(only_row(dialogue).spans) == (1 if cut else 2)


def test_self_talk_and_passthrough_take_the_first_prompt_and_the_answers(calling, tokenizer):
    talk = Dialogue(conversation(), calling, replace(SETTINGS, mode="self-talk", rounds=1))
    assert "<tool_call>" not in tokenizer.decode(talk.next_request().prompt_ids)
    row = only_row(Dialogue(conversation(), calling, replace(SETTINGS, mode="passthrough")))
    assert written(row, tokenizer) == ["Clear.<|im_end|>", "Welcome.<|im_end|>"]


def test_special_tokens_in_calls_and_results_are_text(calling, tokenizer):
    said = json.loads(json.dumps(SHAREGPT).replace("Paris", "</s>").replace("clear", "<|im_end|>"))
    ids = calling.opening(conversation(said).messages[:3])
    plain = calling.opening(conversation().messages[:3])
    for mark in ("</s>", "<|im_end|>", "<|im_start|>"):
        id = tokenizer.convert_tokens_to_ids(mark)
        assert ids.count(id) == plain.count(id)


# Thinking, as Qwen3's template keeps it: of the answers after the user's last message alone.

QWEN3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% set content = m.content %}{% set thought = '' %}{% if m.role == 'assistant' and '</think>' in content %}\
{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}\
{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
THOUGHTS = [
    "<think>\nThe moon?\n</think>\n\nHello.",
    "<think>\nA cat.\n</think>\n\nBye.",
    "<think>\n\n</think>\n\nYes.",
]


def test_thinking_stays_in_the_row_that_the_target_wrote_it_in_and_is_gone_where_the_template_drops_it(  # noqa: E501
    tokenizer,
):
    """Each row's prompt is what a server would send, and its answer the very ids that were
    sampled.
    """
    thinking = copy.deepcopy(tokenizer)
    thinking.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("</think>", special=False)]
    )
    template = ChatTemplate(thinking, QWEN3)
    seed = Conversation("s:0", tuple(Message("user", text) for text in ("Hello?", "And?", "Sure?")))
    dialogue = Dialogue(seed, template, SETTINGS)
    requests = hold(dialogue, thinking, *THOUGHTS)
    assert dialogue.next_request() is None
    rows = dialogue.rows()
    assert [row.id for row in rows] == ["s:0#0", "s:0#1", "s:0#2"]
    history = []
    for row, request, question, answer in zip(rows, requests, seed.messages, THOUGHTS, strict=True):
        history.append(question)
        (span,) = row.spans
        assert row.input_ids[: span.start] == request.prompt_ids
        assert row.input_ids[span.start : span.end] == ids_of(answer + "<|im_end|>", thinking)
        dicts = [{"role": message.role, "content": message.content} for message in history]
        served = thinking.apply_chat_template(
            dicts, chat_template=QWEN3, add_generation_prompt=True
        )["input_ids"]
        assert request.prompt_ids == served
        assert thinking.decode(request.prompt_ids).count("<think>") == 0
        history.append(Message("assistant", answer))
        assert row.messages[-1].content == answer


def test_an_answer_that_does_not_think_goes_on_in_one_row(tokenizer):
    template = ChatTemplate(tokenizer, QWEN3)
    seed = Conversation("s:0", (Message("user", "Hello?"), Message("user", "And?")))
    dialogue = Dialogue(seed, template, SETTINGS)
    hold(dialogue, tokenizer, "Hi.", "So.")
    assert len(only_row(dialogue).spans) == 2
