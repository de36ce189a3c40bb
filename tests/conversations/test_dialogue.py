"""What is asked of the target in a replay, and what stays of what it says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.conversation import Reason, RowRejected
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.requests import Completion, Sampling, sample_seed
from pipeline.conversations.spans import Span
from pipeline.conversations.template import ChatTemplate
from tests.conversations.scripted_target import (
    LOOP,
    SEED,
    SETTINGS,
    answers,
    hold,
    ids_of,
    only_row,
    written,
)


def test_replay_asks_the_seeds_questions_in_order_and_hears_none_of_its_answers(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    requests = hold(dialogue, tokenizer, "One.", "Two.", "Three.", "Four.")
    row = only_row(dialogue)
    assert len(requests) == 3
    assert [message.content for message in row.messages] == [
        *("Be brief.", "Hello?", "One.", "And you?", "Two.", "Bye!", "Three.")
    ]
    assert (row.id, row.parent_id, row.finish) == ("seeds:7", "seeds:7", ["stop"] * 3)
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
        "<|im_start|>user\nBye!<|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>"
    )
    assert written(row, tokenizer) == [*("One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>")]


def test_sampled_ids_stand_in_the_row_as_they_were_sampled(chatml, tokenizer):
    letters = [token for letter in "Hello" for token in ids_of(letter, tokenizer)]
    assert letters != ids_of("Hello", tokenizer), (
        "the tokenizer itself would write it in other tokens"
    )
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, rounds=1))
    request = dialogue.next_request()
    dialogue.receive(Completion(request.id, letters + ids_of("<|im_end|>", tokenizer), "stop"))
    row = only_row(dialogue)
    assert row.input_ids == request.prompt_ids + letters + ids_of("<|im_end|>", tokenizer)
    assert row.spans == [Span(len(request.prompt_ids), len(row.input_ids), "assistant")]
    assert row.num_generated == len(letters) + 1


def test_each_prompt_extends_all_that_went_before(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    prompts = [
        request.prompt_ids for request in hold(dialogue, tokenizer, "One.", "Two…", "Three.")
    ]
    for shorter, longer in itertools.pairwise([*prompts, only_row(dialogue).input_ids]):
        assert longer[: len(shorter)] == shorter


def test_an_end_of_sequence_that_the_template_does_not_use_ends_an_answer_too(chatml, tokenizer):
    sampling = Sampling(stop_token_ids=(tokenizer.eos_token_id,))
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, sampling=sampling, rounds=1))
    request = dialogue.next_request()
    assert set(request.stop_token_ids) == {tokenizer.eos_token_id, *ids_of("<|im_end|>", tokenizer)}
    dialogue.receive(
        Completion(request.id, [*ids_of("One.", tokenizer), tokenizer.eos_token_id], "stop")
    )
    assert answers(only_row(dialogue)) == ["One."]


def test_rounds_bound_the_answers(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, rounds=2))
    assert len(hold(dialogue, tokenizer, *["Yes."] * 9)) == 2
    assert answers(only_row(dialogue)) == ["Yes.", "Yes."]


# What is done with answers that were cut short.


def test_a_truncated_answer_is_kept_and_its_end_of_turn_is_not_the_targets(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    hold(dialogue, tokenizer, "One…", "Two.", "Three.")
    row = only_row(dialogue)
    span = row.spans[0]
    assert row.finish == ["length", "stop", "stop"]
    assert tokenizer.decode(row.input_ids[span.start : span.end]) == "One"
    assert tokenizer.decode(row.input_ids[span.end : row.spans[1].start]) == (
        "<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_dropping_a_truncated_turn_keeps_the_turns_before_it(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, on_truncated="drop-turn"))
    assert len(hold(dialogue, tokenizer, "One.", "Two…", "Three.")) == 2
    row = only_row(dialogue)
    assert (answers(row), row.finish, row.messages[-1].role) == (["One."], ["stop"], "assistant")
    assert tokenizer.decode(row.input_ids).endswith("One.<|im_end|>")


@pytest.mark.parametrize(
    ("policy", "texts"), [("drop-turn", ["One…"]), ("quarantine", ["One.", "Two…"])]
)
def test_a_truncated_answer_refuses_the_conversation_where_the_policy_says_so_or_nothing_is_left(
    policy, texts, chatml, tokenizer
):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, on_truncated=policy))
    hold(dialogue, tokenizer, *texts, "Never asked.")
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected) as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.TRUNCATED


# The context's end.


def test_a_first_prompt_longer_than_the_context_is_refused(chatml):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=20))
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected, match="20") as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.TOO_LONG


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_leaves_a_token_is_asked(chatml):
    num_tokens = len(Dialogue(SEED, chatml, SETTINGS).next_request().prompt_ids)
    assert Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=num_tokens)).next_request() is None
    request = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=num_tokens + 1)).next_request()
    assert request.max_new_tokens == 1


@pytest.mark.parametrize("policy", ["keep", "drop-turn", "quarantine"])
def test_replay_that_reaches_the_contexts_end_keeps_its_finished_turns(policy, chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    (first, second) = hold(dialogue, tokenizer, "One.", "Two.")
    room = len(second.prompt_ids) + 3
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=room, on_truncated=policy))
    requests = hold(dialogue, tokenizer, "One.", "A long story about a cat and the moon.", "Three.")
    assert [request.max_new_tokens for request in requests] == [
        min(200, room - len(first.prompt_ids)),
        3,
    ]
    row = only_row(dialogue)
    assert row.finish == (["stop", "length"] if policy == "keep" else ["stop"])
    assert len(row.input_ids) <= room


@given(
    st.integers(1, 120),
    st.lists(st.sampled_from(["Yes.", "A cat and the moon…", LOOP, "", "Hm…"]), max_size=4),
)
def test_no_row_is_longer_than_the_context_and_every_span_is_what_was_sampled(
    chatml, tokenizer, max_tokens, texts
):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=max_tokens))
    requests = hold(dialogue, tokenizer, *texts, "Yes.", "Yes.", "Yes.")
    assert dialogue.next_request() is None
    assert all(request.max_new_tokens >= 1 for request in requests)
    try:
        (row,) = dialogue.rows()
    except RowRejected:
        return
    assert len(row.input_ids) <= max_tokens
    assert [span.start for span in row.spans] == [
        len(request.prompt_ids) for request in requests[: len(row.spans)]
    ]
    assert row.spans[-1].end == len(row.input_ids)
    assert len(row.finish) == len(row.spans) == len(answers(row))


# Texts that are no use.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOOP + "…", Reason.DEGENERATE_LOOP),
        ("", Reason.NOTHING_GENERATED),
        (" \n", Reason.NOTHING_GENERATED),
    ],
)
def test_a_useless_answer_ends_the_conversation_and_refuses_it_only_if_nothing_remains(
    text, reason, chatml, tokenizer
):
    later = Dialogue(SEED, chatml, SETTINGS)
    assert len(hold(later, tokenizer, "One.", text, "Never asked.")) == 2
    assert answers(only_row(later)) == ["One."]
    at_once = Dialogue(SEED, chatml, SETTINGS)
    assert len(hold(at_once, tokenizer, text, "Never asked.")) == 1
    assert at_once.next_request() is None
    with pytest.raises(RowRejected) as caught:
        at_once.rows()
    assert caught.value.reason is reason


def test_a_seed_that_the_template_refuses_is_refused_before_anything_is_asked(templates, tokenizer):
    dialogue = Dialogue(SEED, ChatTemplate(tokenizer, templates["without-system"]), SETTINGS)
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected, match="System role not supported"):
        dialogue.rows()


# Seeds.


def test_a_samples_seed_depends_on_the_run_the_row_and_the_turn_alone(chatml, tokenizer):
    sampled = replace(SETTINGS, sampling=Sampling(temperature=0.7, top_p=0.9))
    seeds = [
        request.seed
        for request in hold(Dialogue(SEED, chatml, sampled), tokenizer, "One.", "Two.", "Three.")
    ]
    again = [
        request.seed
        for request in hold(Dialogue(SEED, chatml, sampled), tokenizer, "Other.", "Words.", "Here.")
    ]
    assert seeds == again
    other_run = [
        request.seed
        for request in hold(
            Dialogue(SEED, chatml, replace(sampled, seed=1)), tokenizer, "One.", "Two."
        )
    ]
    other_row = [
        request.seed
        for request in hold(
            Dialogue(replace(SEED, id="seeds:8"), chatml, sampled), tokenizer, "One.", "Two."
        )
    ]
    assert len({*seeds, *other_run, *other_row}) == 7


def test_greedy_requests_have_no_seed_and_sampling_settings_reach_the_request(chatml):
    assert Dialogue(SEED, chatml, SETTINGS).next_request().seed is None
    sampling = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=17)
    request = Dialogue(SEED, chatml, replace(SETTINGS, sampling=sampling)).next_request()
    assert (request.temperature, request.top_p, request.max_new_tokens) == (0.7, 0.9, 17)


@given(st.integers(0, 2**40), st.text(), st.integers(0, 100))
def test_a_seed_fits_the_engines_signed_64_bits(run_seed, row_id, turn):
    assert 0 <= sample_seed(run_seed, row_id.encode(errors="replace").decode(), turn) < 2**63


def test_request_ids_are_unique_in_a_conversation(chatml, tokenizer):
    requests = hold(
        Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=4)),
        tokenizer,
        *["Yes."] * 9,
    )
    assert len({request.id for request in requests}) == len(requests) == 7
