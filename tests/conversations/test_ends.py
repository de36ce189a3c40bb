"""Ends of answers: which token stops one, and what the next prompt holds in its place.

The reference is `tokenizer.apply_chat_template` over the messages that a server would receive.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.requests import Completion, Sampling
from pipeline.conversations.row_builder import Chat
from pipeline.conversations.template import ChatTemplate
from tests.conversations.scripted_target import SEED, SETTINGS, ids_of, only_row, written

CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
FINAL = "<|channel|>final<|message|>"
# As gpt-oss: an answer is one of several channels, and ends otherwise where it is the last.
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}\
{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}\
{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}\
{% endfor %}{{ '<|start|>assistant' if add_generation_prompt }}"""  # noqa: E501
# As GLM: the next role's token ends an answer.
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
ROLE_TOKENS = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"""
QUESTIONS = [message.content for message in SEED.messages if message.role == "user"]


@pytest.fixture(scope="module")
def wordy(tokenizer):
    """A tokenizer with the special tokens of these templates."""
    wordy = copy.deepcopy(tokenizer)
    wordy.add_special_tokens({"additional_special_tokens": [*CHANNELS, *ROLES, "<|eom_id|>"]})
    return wordy


def answered(dialogue, tokenizer, *raw_texts):
    """The stop tokens of each request, after these texts with their ends have answered them."""
    stops = []
    for text in raw_texts:
        request = dialogue.next_request()
        stops.append(set(tokenizer.convert_ids_to_tokens(request.stop_token_ids)))
        ids = ids_of(text, tokenizer)
        is_ended = ids[-1] in request.stop_token_ids
        dialogue.receive(Completion(request.id, ids, "stop" if is_ended else "length"))
    assert dialogue.next_request() is None
    return stops


def served_prompts(tokenizer, template, answers):
    """The prompts of the seed's questions that a server would build, after these answers."""
    messages, prompts = [{"role": "system", "content": "Be brief."}], []
    for question, answer in zip(QUESTIONS, [*answers, None], strict=True):
        messages.append({"role": "user", "content": question})
        found = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        prompts.append(found)
        messages.append({"role": "assistant", "content": answer})
    return prompts


def stopping_at(tokenizer, *tokens, **changes):
    stops = tuple(tokenizer.convert_tokens_to_ids(list(tokens)))
    return replace(SETTINGS, sampling=Sampling(max_new_tokens=200, stop_token_ids=stops), **changes)


def test_a_thought_s_end_is_no_end_of_its_answer(wordy):
    settings = stopping_at(wordy, "<|return|>", "<|call|>")
    dialogue = Dialogue(SEED, ChatTemplate(wordy, HARMONY), settings)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = [f"{thought}{FINAL}One.<|return|>", f"{FINAL}Two.<|return|>", f"{thought}{FINAL}Th"]
    assert answered(dialogue, wordy, *said) == [{"<|return|>", "<|call|>"}] * 3
    rows = dialogue.rows()
    assert [row.id for row in rows] == ["seeds:7#0", "seeds:7#1", "seeds:7#2"]
    prompts = served_prompts(wordy, HARMONY, ["One.", "Two."])
    for row, prompt, text in zip(rows, prompts, said, strict=True):
        assert row.input_ids[: row.spans[0].start] == prompt
        assert written(row, wordy) == [text]
    assert [message.content for message in rows[-1].messages[2::2]] == ["One.", "Two.", "Th"]


def test_a_thought_cut_before_its_answer_leaves_an_empty_answer(wordy):
    settings = stopping_at(wordy, "<|return|>", rounds=2)
    dialogue = Dialogue(SEED, ChatTemplate(wordy, HARMONY), settings)
    said = ["<|channel|>analysis<|message|>Hm", f"{FINAL}Two.<|return|>"]
    answered(dialogue, wordy, *said)
    first, second = dialogue.rows()
    assert written(first, wordy) + written(second, wordy) == said
    prompts = served_prompts(wordy, HARMONY, ["", "Two."])
    assert second.input_ids[: second.spans[0].start] == prompts[1]


def test_recorded_answers_of_channels_end_as_the_template_s_last(wordy):
    settings = stopping_at(wordy, "<|return|>", mode="passthrough")
    dialogue = Dialogue(SEED, ChatTemplate(wordy, HARMONY), settings)
    answered(dialogue, wordy)
    texts = [text for row in dialogue.rows() for text in written(row, wordy)]
    assert texts == [f"{FINAL}Seed one.<|return|>", f"{FINAL}Seed two.<|return|>"]


FOREIGN = [
    ("chatml", "<|im_end|>", "</s>"),
    ("llama-3", "<|eot_id|>", "<|eom_id|>"),
    ("glm", "<|user|>", "<|observation|>"),
]


@pytest.mark.parametrize(("family", "own", "other"), FOREIGN)
def test_another_end_than_the_template_s_begins_a_new_row(family, own, other, wordy, templates):
    """Three answers end with the template's token, another one, and the template's."""
    text = {**templates, "glm": ROLE_TOKENS}[family]
    dialogue = Dialogue(SEED, ChatTemplate(wordy, text), stopping_at(wordy, own, other))
    said = [f"One.{own}", f"Two.{other}", f"Three.{own}"]
    assert answered(dialogue, wordy, *said) == [{own, other}] * 3
    first, second = dialogue.rows()
    assert written(first, wordy) == said[:2] and written(second, wordy) == said[2:]
    found = [first.input_ids[: span.start] for span in first.spans]
    found.append(second.input_ids[: second.spans[0].start])
    assert found == served_prompts(wordy, text, ["One.", "Two."])


def test_a_chat_goes_on_as_served_after_another_end(wordy, templates):
    chat = Chat(ChatTemplate(wordy, templates["chatml"]), room=500, system="Be brief.")
    chat.ask(QUESTIONS[0])
    chat.answered(ids_of("One.</s>", wordy), ended=True)
    _, second, _ = served_prompts(wordy, templates["chatml"], ["One.", "Two."])
    assert chat.ask(QUESTIONS[1]) == (second, False)


def test_a_template_s_end_that_nobody_states_stops_an_answer(wordy, templates):
    """Chat models trained from a base model may keep its generation_config."""
    template = ChatTemplate(wordy, templates["chatml"])
    dialogue = Dialogue(SEED, template, stopping_at(wordy, "</s>"))
    assert answered(dialogue, wordy, *["Yes.<|im_end|>"] * 3) == [{"</s>", "<|im_end|>"}] * 3
    assert len(dialogue.rows()) == 1


# Generation prompts that prefill text, and recorded answers that hold it.

# As DeepSeek-R1: thoughts are left out, and the prompt opens one.
OPENED = """{% for m in messages %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}\
<|im_start|>{{ m.role }}
{{ said if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' + prefilled if add_generation_prompt }}"""
THOUGHT, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("prefilled", "recorded", "learned"),
    [
        (THOUGHT, "<think>\nHm.\n</think>\n\nYes.", "Hm.\n</think>\n\nYes."),
        (THOUGHT, "<think>\n\n</think>\n\nYes.", "\n</think>\n\nYes."),
        (THOUGHT, "Hm.\n</think>\n\nYes.", "Hm.\n</think>\n\nYes."),
        (EMPTY, "<think>\n\n</think>\n\nYes.", "Yes."),
        (EMPTY, "Yes.", "Yes."),
    ],
)
def test_a_recorded_answer_begins_after_what_its_prompt_holds(
    prefilled, recorded, learned, tokenizer
):
    template = ChatTemplate(tokenizer, OPENED, arguments={"prefilled": prefilled})
    said = Message("assistant", recorded)
    seed = Conversation("s:0", (Message("user", "Is it?"), said))
    row = only_row(Dialogue(seed, template, replace(SETTINGS, mode="passthrough")))
    assert written(row, tokenizer) == [f"{learned}<|im_end|>"]
    assert tokenizer.decode(row.input_ids).count("<think>") == (1 if prefilled else 0)
