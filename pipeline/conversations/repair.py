"""Repairs a row's turns where the meaning is clear and rejects the row with a reason where it is not.

Repaired: byte order marks, NULs, lone surrogates and white space around a text; empty or repeated system prompts;
answers before the first question; an empty last answer; a user's message that is repeated or split in two. Nothing is
guessed: two different consecutive answers mean that a question is missing, and the row is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.conversations.conversation import UNDECODABLE_MARK, Message, Reason, Role, RowRejected, encodable


def clean_text(text: Any) -> str:
    """A turn's text without byte order marks, NULs and surrounding white space.

    Raises:
        RowRejected: It is not a string, or it has undecodable bytes.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.NOT_TEXT, f"A turn's text is a {type(text).__name__}.")
    if UNDECODABLE_MARK in text:
        raise RowRejected(Reason.UNDECODABLE, "A turn has bytes that are not UTF-8.")
    # Leading white space of the first line is kept: it may be the indentation of code.
    return encodable(text).replace("\0", "").lstrip("\ufeff\r\n").rstrip()


def repair(turns: Sequence[tuple[Role, str]], max_characters: int) -> tuple[Message, ...]:
    """The turns, clean texts, as a conversation's messages.

    Raises:
        RowRejected: They do not form a conversation, or have more than `max_characters` characters.
    """
    if not turns or not any(text for _, text in turns):
        raise RowRejected(Reason.EMPTY, "There is no text in it.")
    said = _without_loose_ends(turns)
    if not any(role == "user" for role, _ in said):
        raise RowRejected(Reason.NO_USER_TURN, "The user says nothing.")
    if any(not text for _, text in said):
        raise RowRejected(Reason.EMPTY, "A turn in the middle has no text.")
    messages = _joined(said)
    num_characters = sum(len(message.content) for message in messages)
    if num_characters > max_characters:
        raise RowRejected(
            Reason.TOO_LONG, f"{num_characters:,} characters; seeds.max_characters is {max_characters:,}."
        )
    return messages


def _without_loose_ends(turns: Sequence[tuple[Role, str]]) -> list[tuple[Role, str]]:
    """Without empty system prompts, answers before the first question, and empty turns at the end."""
    said = [(role, text) for role, text in turns if text or role != "system"]
    while said and not said[-1][1]:
        said.pop()
    first = next((index for index, (role, _) in enumerate(said) if role == "user"), len(said))
    return [turn for turn in said[:first] if turn[0] == "system"] + said[first:]


def _joined(said: Sequence[tuple[Role, str]]) -> tuple[Message, ...]:
    """One message per turn; consecutive messages of a role are joined where that is their meaning."""
    questions_only = not any(role == "assistant" for role, _ in said)
    messages: list[Message] = []
    for role, text in said:
        last = messages[-1] if messages else None
        if role == "system" and last and last.role != "system":
            raise RowRejected(Reason.WRONG_ORDER, "A system prompt stands after the first turn.")
        if last is None or last.role != role or (questions_only and role == "user"):
            messages.append(Message(role, text))
        elif role == "assistant" and last.content != text:
            raise RowRejected(Reason.WRONG_ORDER, "Two answers stand in a row: a question is missing.")
        elif last.content != text:
            messages[-1] = Message(role, f"{last.content}\n\n{text}")
    return tuple(messages)
