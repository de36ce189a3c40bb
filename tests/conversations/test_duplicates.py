"""Duplicates, near-duplicates, and the check's questions."""

from __future__ import annotations

import json

import pytest

from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator


def asks(text: str, id: str = "s:0") -> Conversation:
    return Conversation(id, (Message("user", text),))


def test_the_same_messages_are_a_duplicate_across_sources():
    """Roles, calls and offered tools count; ids do not."""

    def messages(role="assistant", city="Rome"):
        call = json.dumps([{"name": "weather", "arguments": {"city": city}}])
        asked = Message("user", "Rain?"), Message("assistant", "", call), Message("tool", "No.")
        return (*asked, Message(role, "So."))

    seen = Deduplicator("passthrough")
    for conversation in (
        Conversation("a:0", messages(), "x"),
        Conversation("a:1", messages("user")),
        Conversation("a:2", messages(city="Oslo")),
        Conversation("a:3", messages(), tools='["other"]'),
    ):
        assert seen.check(conversation) is conversation
    again = seen.check(Conversation("b:0", messages(), "y", "writing"))
    assert (again.id, again.reason) == ("b:0", Reason.DUPLICATE) and "a:0" in again.detail


QUESTION = "Compose an engaging travel blog post about a recent trip to Hawaii"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (QUESTION, True),
        (f"Please: {QUESTION.upper()}?! Thanks.", True),
        (QUESTION.replace("Hawaii", "Rome"), False),
        (QUESTION.replace(" a recent", ",\n a  recent"), True),
        ("why", True),
        ("Why? Because.", False),  # a short question counts as a whole message alone
    ],
)
def test_a_question_of_the_check_is_found_in_any_turn(text, held):
    check = CheckQuestions([asks(QUESTION, "bench:7"), asks("Why?", "bench:8")])
    for messages in ([Message("user", text)], [Message("user", "Hi."), Message("assistant", text)]):
        outcome = check.check(Conversation("s:0", tuple(messages)))
        assert isinstance(outcome, RejectedRow) == held
        assert not held or (outcome.reason is Reason.CONTAMINATED and "bench:" in outcome.detail)
