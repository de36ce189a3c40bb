"""What is asked of the target, and what stays of what it says. The target here is a script."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.conversation import Conversation, Message, Reason, Refusal
from pipeline.conversations.dialogue import Completion, Dialogue, DialogueSettings, Sampling
from pipeline.conversations.exchange import sample_seed
from pipeline.conversations.spans import Span
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError

SEED = Conversation(
    "seeds:7",
    (
        Message("system", "Be brief."),
        Message("user", "Hello?"),
        Message("assistant", "Seed one."),
        Message("user", "And you?"),
        Message("assistant", "Seed two."),
        Message("user", "Bye!"),
    ),
)
SETTINGS = DialogueSettings("replay", Sampling(max_new_tokens=200), max_tokens=1000)
LOOP = "la la " * 40


@pytest.fixture(scope="module")
def chatml(tokenizer, templates):
    return ChatTemplate(tokenizer, templates["chatml"])


@pytest.fixture(scope="module")
def ids_of(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def hold(ids_of):
    """Holds a dialogue with a target that says the given texts; one that ends with '…' runs into its limit there."""

    def hold(dialogue, *texts):
        requests = []
        for text in texts:
            request = dialogue.next_request()
            if request is None:
                break
            requests.append(request)
            ids = ids_of(text.removesuffix("…")) if text.endswith("…") else ids_of(text + "<|im_end|>")
            cut = text.endswith("…") or len(ids) > request.max_new_tokens
            finished = "length" if cut else "stop"
            dialogue.receive(Completion(request.id, ids[: request.max_new_tokens], finished))
        return requests

    return hold


def said(row):
    return [message.content for message in row.messages if message.role == "assistant"]


def only_row(dialogue):
    assert dialogue.next_request() is None
    (row,) = dialogue.rows()
    return row


def test_replay_asks_the_seeds_questions_in_order_and_hears_none_of_its_answers(chatml, hold, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    requests = hold(dialogue, "One.", "Two.", "Three.", "Four.")
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
    assert [tokenizer.decode(row.input_ids[span.start : span.end]) for span in row.spans] == [
        *("One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>")
    ]


def test_sampled_ids_stand_in_the_row_as_they_were_sampled(chatml, ids_of):
    letters = [token for letter in "Hello" for token in ids_of(letter)]
    assert letters != ids_of("Hello"), "the tokenizer itself would write it in other tokens"
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, rounds=1))
    request = dialogue.next_request()
    dialogue.receive(Completion(request.id, letters + ids_of("<|im_end|>"), "stop"))
    row = only_row(dialogue)
    assert row.input_ids == request.prompt_ids + letters + ids_of("<|im_end|>")
    assert row.spans == [Span(len(request.prompt_ids), len(row.input_ids), "assistant")]
    assert row.num_generated == len(letters) + 1


def test_each_prompt_extends_all_that_went_before(chatml, hold):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    prompts = [request.prompt_ids for request in hold(dialogue, "One.", "Two…", "Three.")]
    for shorter, longer in itertools.pairwise([*prompts, only_row(dialogue).input_ids]):
        assert longer[: len(shorter)] == shorter


def test_an_end_of_sequence_that_the_template_does_not_use_ends_an_answer_too(chatml, tokenizer, ids_of):
    sampling = Sampling(stop_token_ids=(tokenizer.eos_token_id,))
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, sampling=sampling, rounds=1))
    request = dialogue.next_request()
    assert set(request.stop_token_ids) == {tokenizer.eos_token_id, *ids_of("<|im_end|>")}
    dialogue.receive(Completion(request.id, [*ids_of("One."), tokenizer.eos_token_id], "stop"))
    assert said(only_row(dialogue)) == ["One."]


def test_rounds_bound_the_answers(chatml, hold):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, rounds=2))
    assert len(hold(dialogue, *["Yes."] * 9)) == 2
    assert said(only_row(dialogue)) == ["Yes.", "Yes."]


# What is done with answers that were cut short.


def test_a_truncated_answer_is_kept_and_its_end_of_turn_is_not_the_targets(chatml, hold, tokenizer):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    hold(dialogue, "One…", "Two.", "Three.")
    row = only_row(dialogue)
    span = row.spans[0]
    assert row.finish == ["length", "stop", "stop"]
    assert tokenizer.decode(row.input_ids[span.start : span.end]) == "One"
    assert tokenizer.decode(row.input_ids[span.end : row.spans[1].start]) == (
        "<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_dropping_a_truncated_turn_keeps_the_turns_before_it(chatml, hold, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, on_truncated="drop-turn"))
    assert len(hold(dialogue, "One.", "Two…", "Three.")) == 2
    row = only_row(dialogue)
    assert (said(row), row.finish, row.messages[-1].role) == (["One."], ["stop"], "assistant")
    assert tokenizer.decode(row.input_ids).endswith("One.<|im_end|>")


@pytest.mark.parametrize(("policy", "texts"), [("drop-turn", ["One…"]), ("quarantine", ["One.", "Two…"])])
def test_a_truncated_answer_refuses_the_conversation_where_the_policy_says_so_or_nothing_is_left(
    policy, texts, chatml, hold
):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, on_truncated=policy))
    hold(dialogue, *texts, "Never asked.")
    assert dialogue.next_request() is None
    with pytest.raises(Refusal) as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.TRUNCATED


# The context's end.


def test_a_first_prompt_longer_than_the_context_is_refused(chatml):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=20))
    assert dialogue.next_request() is None
    with pytest.raises(Refusal, match="20") as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.TOO_LONG


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_leaves_a_token_is_asked(chatml):
    num_tokens = len(Dialogue(SEED, chatml, SETTINGS).next_request().prompt_ids)
    assert Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=num_tokens)).next_request() is None
    request = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=num_tokens + 1)).next_request()
    assert request.max_new_tokens == 1


@pytest.mark.parametrize("policy", ["keep", "drop-turn", "quarantine"])
def test_replay_that_reaches_the_contexts_end_keeps_its_finished_turns(policy, chatml, hold):
    dialogue = Dialogue(SEED, chatml, SETTINGS)
    (first, second) = hold(dialogue, "One.", "Two.")
    room = len(second.prompt_ids) + 3
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=room, on_truncated=policy))
    requests = hold(dialogue, "One.", "A long story about a cat and the moon.", "Three.")
    assert [request.max_new_tokens for request in requests] == [min(200, room - len(first.prompt_ids)), 3]
    row = only_row(dialogue)
    assert row.finish == (["stop", "length"] if policy == "keep" else ["stop"])
    assert len(row.input_ids) <= room


@given(st.integers(1, 120), st.lists(st.sampled_from(["Yes.", "A cat and the moon…", LOOP, "", "Hm…"]), max_size=4))
def test_no_row_is_longer_than_the_context_and_every_span_is_what_was_sampled(chatml, hold, max_tokens, texts):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, max_tokens=max_tokens))
    requests = hold(dialogue, *texts, "Yes.", "Yes.", "Yes.")
    assert dialogue.next_request() is None
    assert all(request.max_new_tokens >= 1 for request in requests)
    try:
        (row,) = dialogue.rows()
    except Refusal:
        return
    assert len(row.input_ids) <= max_tokens
    assert [span.start for span in row.spans] == [len(request.prompt_ids) for request in requests[: len(row.spans)]]
    assert row.spans[-1].end == len(row.input_ids)
    assert len(row.finish) == len(row.spans) == len(said(row))


# Texts that are no use.


@pytest.mark.parametrize(
    ("text", "reason"),
    [(LOOP + "…", Reason.DEGENERATE_LOOP), ("", Reason.NOTHING_GENERATED), (" \n", Reason.NOTHING_GENERATED)],
)
def test_a_useless_answer_ends_the_conversation_and_refuses_it_only_if_nothing_remains(text, reason, chatml, hold):
    later = Dialogue(SEED, chatml, SETTINGS)
    assert len(hold(later, "One.", text, "Never asked.")) == 2
    assert said(only_row(later)) == ["One."]
    at_once = Dialogue(SEED, chatml, SETTINGS)
    assert len(hold(at_once, text, "Never asked.")) == 1
    assert at_once.next_request() is None
    with pytest.raises(Refusal) as caught:
        at_once.rows()
    assert caught.value.reason is reason


def test_a_seed_that_the_template_refuses_is_refused_before_anything_is_asked(tokenizer, templates):
    dialogue = Dialogue(SEED, ChatTemplate(tokenizer, templates["without-system"]), SETTINGS)
    assert dialogue.next_request() is None
    with pytest.raises(Refusal, match="System role not supported"):
        dialogue.rows()


# Self-talk.


def test_self_talk_writes_both_roles_from_the_first_prompt_alone(chatml, hold, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=2))
    requests = hold(dialogue, "One.", "A question?", "Two.", "Never asked.")
    row = only_row(dialogue)
    assert len(requests) == 3
    assert [span.role for span in row.spans] == ["assistant", "user", "assistant"]
    assert [tokenizer.decode(row.input_ids[span.start : span.end]) for span in row.spans] == [
        *("One.<|im_end|>", "A question?<|im_end|>", "Two.<|im_end|>")
    ]
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nA question?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>"
    )


def test_self_talk_supplies_the_end_of_a_truncated_user_text(chatml, hold, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=2))
    hold(dialogue, "One…", "A question…", "Two.")
    row = only_row(dialogue)
    one, question, two = row.spans
    assert tokenizer.decode(row.input_ids[one.end : question.start]) == "<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(row.input_ids[question.end : two.start]) == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["", LOOP + "…"], ids=["empty", "loop"])
def test_self_talk_ends_with_its_last_answer_when_the_user_has_nothing_to_say(text, chatml, hold):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk"))
    assert len(hold(dialogue, "One.", text, "Never asked.")) == 2
    row = only_row(dialogue)
    assert [span.role for span in row.spans] == ["assistant"]
    assert row.messages[-1].content == "One."


def test_self_talk_without_rounds_ends_with_the_context(chatml, hold):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", max_tokens=100))
    requests = hold(dialogue, *["Fine, thank you."] * 50)
    row = only_row(dialogue)
    assert 3 < len(requests) < 50
    assert len(row.input_ids) <= 100
    assert row.messages[-1].role == "assistant"


def test_self_talk_needs_a_token_that_ends_a_user_text(tokenizer, templates):
    with pytest.raises(ConfigError, match="replay"):
        Dialogue(SEED, ChatTemplate(tokenizer, templates["vicuna"]), replace(SETTINGS, mode="self-talk"))


# Passthrough.


def test_passthrough_keeps_the_seeds_answers_and_asks_for_nothing(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="passthrough"))
    row = only_row(dialogue)
    assert said(row) == ["Seed one.", "Seed two."]
    answered = [{"role": message.role, "content": message.content} for message in SEED.messages[:-1]]
    expected = tokenizer.apply_chat_template(answered, chat_template=chatml._template)["input_ids"]
    assert row.input_ids == expected[: len(row.input_ids)]
    assert [tokenizer.decode(row.input_ids[span.start : span.end]) for span in row.spans] == [
        *("Seed one.<|im_end|>", "Seed two.<|im_end|>")
    ]


def test_passthrough_refuses_a_seed_without_answers(chatml):
    dialogue = Dialogue(
        Conversation("q:0", (Message("user", "Hello?"),)), chatml, replace(SETTINGS, mode="passthrough")
    )
    assert dialogue.next_request() is None
    with pytest.raises(Refusal) as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.NOTHING_GENERATED


def test_passthrough_is_cut_by_the_context_and_not_by_the_longest_answer(chatml):
    short = replace(SETTINGS, mode="passthrough", sampling=Sampling(max_new_tokens=1))
    assert said(only_row(Dialogue(SEED, chatml, short))) == ["Seed one.", "Seed two."]
    whole = only_row(Dialogue(SEED, chatml, short))
    cut = only_row(Dialogue(SEED, chatml, replace(short, max_tokens=len(whole.input_ids) - 1)))
    assert (cut.finish, cut.input_ids) == (["stop", "length"], whole.input_ids[:-1])


# Templates that rewrite history.


def test_a_rewritten_history_gives_one_row_per_turn_each_with_the_prompt_that_is_served(tokenizer, templates, hold):
    template = ChatTemplate(tokenizer, templates["forgetful"])
    dialogue = Dialogue(SEED, template, SETTINGS)
    answers = ["<think>\nHm.\n</think>\n\nOne.", "<think>\nOh.\n</think>\n\nTwo.", "Three."]
    hold(dialogue, *answers)
    assert dialogue.next_request() is None
    rows = dialogue.rows()
    assert [(row.id, row.parent_id, len(row.spans)) for row in rows] == [
        (f"seeds:7#{turn}", "seeds:7", 1) for turn in range(3)
    ]
    questions = [message.content for message in SEED.messages if message.role == "user"]
    for turn, row in enumerate(rows):
        history = [{"role": "system", "content": "Be brief."}]
        for question, answer in zip(questions[:turn], answers, strict=False):
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        history.append({"role": "user", "content": questions[turn]})
        served = tokenizer.apply_chat_template(
            history, chat_template=templates["forgetful"], add_generation_prompt=True
        )
        assert row.input_ids[: row.spans[0].start] == served["input_ids"]
        assert tokenizer.decode(row.input_ids[row.spans[0].start :]) == answers[turn] + "<|im_end|>"


def test_self_talk_goes_on_in_a_new_row_where_history_is_rewritten(tokenizer, templates, hold):
    template = ChatTemplate(tokenizer, templates["forgetful"])
    dialogue = Dialogue(SEED, template, replace(SETTINGS, mode="self-talk", rounds=2))
    hold(dialogue, "<think>\nHm.\n</think>\n\nOne.", "A question?", "Two.")
    assert dialogue.next_request() is None
    first, second = dialogue.rows()
    assert tokenizer.decode(first.input_ids).endswith("<think>\nHm.\n</think>\n\nOne.<|im_end|>")
    assert tokenizer.decode(second.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nA question?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>"
    )
    assert [tokenizer.decode(second.input_ids[s.start : s.end]) for s in second.spans] == ["Two.<|im_end|>"]


def test_a_history_that_is_not_rewritten_stays_one_row_under_its_own_id(tokenizer, templates, hold):
    dialogue = Dialogue(SEED, ChatTemplate(tokenizer, templates["forgetful"]), SETTINGS)
    hold(dialogue, "One.", "Two.", "Three.")
    row = only_row(dialogue)
    assert (row.id, len(row.spans)) == ("seeds:7", 3)


# Seeds.


def test_a_samples_seed_depends_on_the_run_the_row_and_the_turn_alone(chatml, hold):
    sampled = replace(SETTINGS, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5))
    seeds = [request.seed for request in hold(Dialogue(SEED, chatml, sampled), "One.", "Two.", "Three.")]
    again = [request.seed for request in hold(Dialogue(SEED, chatml, sampled), "Other.", "Words.", "Here.")]
    assert seeds == again
    other_run = [request.seed for request in hold(Dialogue(SEED, chatml, replace(sampled, seed=1)), "One.", "Two.")]
    other_row = [
        request.seed for request in hold(Dialogue(replace(SEED, id="seeds:8"), chatml, sampled), "One.", "Two.")
    ]
    assert len({*seeds, *other_run, *other_row}) == 7


def test_greedy_requests_have_no_seed_and_sampling_settings_reach_the_request(chatml):
    assert Dialogue(SEED, chatml, SETTINGS).next_request().seed is None
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=17)
    request = Dialogue(SEED, chatml, replace(SETTINGS, sampling=sampling)).next_request()
    assert (request.temperature, request.top_p, request.top_k, request.max_new_tokens) == (0.7, 0.9, 5, 17)


@given(st.integers(0, 2**40), st.text(), st.integers(0, 100))
def test_a_seed_fits_the_engines_signed_64_bits(run_seed, row_id, turn):
    assert 0 <= sample_seed(run_seed, row_id.encode(errors="replace").decode(), turn) < 2**63


def test_request_ids_are_unique_in_a_conversation(chatml, hold):
    requests = hold(Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=4)), *["Yes."] * 9)
    assert len({request.id for request in requests}) == len(requests) == 7
