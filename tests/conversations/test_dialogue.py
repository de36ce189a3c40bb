"""Requests of a dialogue in each mode, and its training rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pipeline.conversations.conversation import Conversation, Message, Reason, RowRejected
from pipeline.conversations.dialogue import Dialogue, require_both_sides
from pipeline.conversations.requests import Completion, Sampling
from pipeline.conversations.spans import Span
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError
from tests.conversations.scripted_target import (
    END,
    LOOP,
    SEED,
    SETTINGS,
    answers,
    hold,
    ids_of,
    only_row,
    seed_dialogue,
    written,
)


def rejected(dialogue: Dialogue) -> Reason:
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected) as caught:
        dialogue.rows()
    return caught.value.reason


def chatml_text(*turns: str) -> str:
    """The seed's system prompt, then these turns, in ChatML; a last turn with '…' is not ended."""
    text = f"<|im_start|>system\nBe brief.{END}"
    for number, turn in enumerate(turns):
        role = ("user", "assistant")[number % 2]
        text += f"\n<|im_start|>{role}\n{turn.removesuffix('…')}{END}"
    return text.removesuffix(END) if turns[-1].endswith("…") else text


SELF_TALK = {"mode": "self-talk", "rounds": 2}
LATE = {"on_truncated": "drop-turn"}
STRICT = {"on_truncated": "quarantine"}


@pytest.mark.parametrize(
    ("changes", "said", "expected"),
    [
        ({}, "One.|Two.|Three.", "Hello?|One.|And you?|Two.|Bye!|Three."),
        ({}, "One…|Two.|Three.", "Hello?|One…|And you?|Two.|Bye!|Three."),
        (LATE, "One.|Two…", "Hello?|One."),
        (STRICT, "One.|Two…", Reason.TRUNCATED),
        ({}, f"One.|{LOOP}…", "Hello?|One."),
        ({}, "One.|", "Hello?|One."),
        ({}, "", Reason.NOTHING_GENERATED),
        (SELF_TALK, "One.|A question?|Two.", "Hello?|One.|A question?|Two."),
        (SELF_TALK, "One.|", "Hello?|One."),
    ],
)
def test_a_row_ends_with_the_last_usable_answer(changes, said, expected, chatml, tokenizer):
    dialogue = seed_dialogue(chatml, **changes)
    requests = hold(dialogue, tokenizer, *said.split("|"), "Never asked.")
    assert len({request.id for request in requests}) == len(requests) == said.count("|") + 1
    if isinstance(expected, Reason):
        assert rejected(dialogue) is expected
        return
    turns = expected.split("|")
    texts = turns[1:] if changes is SELF_TALK else turns[1::2]
    row = only_row(dialogue)
    assert tokenizer.decode(row.input_ids) == chatml_text(*turns)
    assert [message.content for message in row.messages[1:]] == expected.replace("…", "").split("|")
    assert row.finish == ["length" if text.endswith("…") else "stop" for text in texts]
    assert written(row, tokenizer) == [f"{text}{END}".replace(f"…{END}", "") for text in texts]
    said_by_target = row.messages[2:] if changes is SELF_TALK else row.messages[2::2]
    assert [span.role for span in row.spans] == [message.role for message in said_by_target]
    assert row.id == row.parent_id == "seeds:7"
    prompts = [request.prompt_ids for request in requests]
    for shorter, longer in itertools.pairwise([*prompts[: len(row.spans)], row.input_ids]):
        assert longer[: len(shorter)] == shorter


def test_sampled_ids_stand_in_the_row_as_they_were_sampled(chatml, tokenizer):
    letters = [token for letter in "Hello" for token in ids_of(letter, tokenizer)]
    assert letters != ids_of("Hello", tokenizer), "the tokenizer would write other tokens"
    dialogue = seed_dialogue(chatml, rounds=1)
    request = dialogue.next_request()
    answer = letters + ids_of(END, tokenizer)
    dialogue.receive(Completion(request.id, answer, "stop"))
    row = only_row(dialogue)
    assert row.input_ids == request.prompt_ids + answer
    assert row.spans == [Span(len(request.prompt_ids), len(row.input_ids), "assistant")]


def test_a_prompt_is_asked_only_with_room_for_a_token(chatml):
    num_tokens = len(seed_dialogue(chatml).next_request().prompt_ids)
    assert rejected(seed_dialogue(chatml, max_tokens=num_tokens)) is Reason.TOO_LONG
    request = seed_dialogue(chatml, max_tokens=num_tokens + 1).next_request()
    assert request.max_new_tokens == 1


@pytest.mark.parametrize("policy", ["keep", "drop-turn", "quarantine"])
def test_replay_at_the_context_s_end_keeps_finished_turns(policy, chatml, tokenizer):
    first, second = hold(seed_dialogue(chatml), tokenizer, "One.", "Two.")
    room = len(second.prompt_ids) + 3
    dialogue = seed_dialogue(chatml, max_tokens=room, on_truncated=policy)
    requests = hold(dialogue, tokenizer, "One.", "A long story about a cat and the moon.", "Three.")
    most = [request.max_new_tokens for request in requests]
    assert most == [min(200, room - len(first.prompt_ids)), 3]
    row = only_row(dialogue)
    assert row.finish == (["stop", "length"] if policy == "keep" else ["stop"])
    assert len(row.input_ids) <= room


def test_an_unusable_seed_is_rejected_unasked(chatml, templates, tokenizer):
    template = ChatTemplate(tokenizer, templates["without-system"])
    assert rejected(seed_dialogue(template)) is Reason.TEMPLATE_REFUSED
    unanswered = Conversation("q:0", (Message("user", "Hello?"),))
    dialogue = Dialogue(unanswered, chatml, replace(SETTINGS, mode="passthrough"))
    assert rejected(dialogue) is Reason.NOTHING_GENERATED


# Sampling.


def test_a_seed_depends_only_on_run_row_and_turn(chatml, tokenizer):
    sampled = replace(SETTINGS, sampling=Sampling(temperature=0.7, top_p=0.9))

    def seeds(settings, seed=SEED, texts=("One.", "Two."), sample=1):
        requests = hold(Dialogue(seed, chatml, settings, sample), tokenizer, *texts)
        return [request.seed for request in requests]

    assert seeds(sampled) == seeds(sampled, texts=("Other.", "Words."))
    other_run = seeds(replace(sampled, seed=1))
    other_row = seeds(sampled, replace(SEED, id="seeds:8"))
    other_sample = seeds(sampled, sample=2)
    different = {*seeds(sampled), *other_run, *other_row, *other_sample}
    assert len(different) == 8 and all(0 <= seed < 2**63 for seed in different)
    assert other_sample == seeds(sampled, replace(SEED, id="seeds:7~2"))


# Self-talk.


def test_self_talk_without_rounds_ends_with_the_context(chatml, tokenizer):
    dialogue = seed_dialogue(chatml, mode="self-talk", max_tokens=100)
    assert 3 < len(hold(dialogue, tokenizer, *["Fine, thank you."] * 50)) < 50
    row = only_row(dialogue)
    assert len(row.input_ids) <= 100 and row.messages[-1].role == "assistant"


def test_self_talk_needs_a_token_that_ends_a_user_text(templates, tokenizer):
    with pytest.raises(ConfigError, match="replay"):
        require_both_sides(ChatTemplate(tokenizer, templates["vicuna"]), "self-talk")


# Passthrough.


def test_passthrough_keeps_the_seed_s_answers_and_asks_nothing(chatml, templates, tokenizer):
    row = only_row(seed_dialogue(chatml, mode="passthrough"))
    answered = [{"role": said.role, "content": said.content} for said in SEED.messages[:-1]]
    expected = tokenizer.apply_chat_template(answered, chat_template=templates["chatml"])
    assert row.input_ids == expected["input_ids"][: len(row.input_ids)]
    assert written(row, tokenizer) == [f"Seed one.{END}", f"Seed two.{END}"]


def test_an_answer_marked_not_to_learn_is_context_without_a_span(chatml, tokenizer):
    first, second = 2, 4  # the answers among the seed's messages
    plain = only_row(seed_dialogue(chatml, mode="passthrough"))
    for number, learned in ((first, "Seed two."), (second, "Seed one.")):
        messages = list(SEED.messages)
        messages[number] = replace(messages[number], learned=False)
        seed = replace(SEED, messages=tuple(messages))
        dialogue = Dialogue(seed, chatml, replace(SETTINGS, mode="passthrough"))
        row = only_row(dialogue)
        assert row.input_ids == plain.input_ids
        assert written(row, tokenizer) == [f"{learned}{END}"] and row.finish == ["stop"]
        assert dialogue.unlearned_answers == 1


def test_passthrough_is_cut_by_the_context_alone(chatml):
    short = {"mode": "passthrough", "sampling": Sampling(max_new_tokens=1)}
    whole = only_row(seed_dialogue(chatml, **short))
    assert answers(whole) == ["Seed one.", "Seed two."]
    cut = only_row(seed_dialogue(chatml, **short, max_tokens=len(whole.input_ids) - 1))
    assert (cut.finish, cut.input_ids) == (["stop", "length"], whole.input_ids[:-1])


# Templates that rewrite history.


def test_a_rewritten_history_gives_one_row_per_turn(templates, tokenizer):
    """Each with the prompt that a server would send."""
    dialogue = seed_dialogue(ChatTemplate(tokenizer, templates["forgetful"]))
    said = ["<think>\nHm.\n</think>\n\nOne.", "<think>\nOh.\n</think>\n\nTwo.", "Three."]
    hold(dialogue, tokenizer, *said)
    assert dialogue.next_request() is None
    history = [{"role": "system", "content": "Be brief."}]
    questions = [message.content for message in SEED.messages if message.role == "user"]
    for turn, (row, question) in enumerate(zip(dialogue.rows(), questions, strict=True)):
        assert (row.id, row.parent_id) == (f"seeds:7#{turn}", "seeds:7")
        history.append({"role": "user", "content": question})
        served = tokenizer.apply_chat_template(
            history, chat_template=templates["forgetful"], add_generation_prompt=True
        )
        (span,) = row.spans
        assert row.input_ids[: span.start] == served["input_ids"]
        assert written(row, tokenizer) == [said[turn] + END]
        history.append({"role": "assistant", "content": said[turn]})
