"""Repair a row's turns where the meaning is plain, refuse it with a reason where it is not.

Mended: byte order marks, NULs, lone surrogates and white space around a text; empty system prompts and several of
them; answers before the first question; an empty last answer; a message said twice, or in two parts, by the user.
Nothing is guessed: two different answers in a row mean that a question is missing, and refuse the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.conversations.conversation import UNDECODABLE_MARK, Message, Reason, Role, RowRejected, encodable


def clean_text(text: Any) -> str:
    """A turn's text without what no one meant to write: byte order marks, NULs, white space around it.

    Raises:
        RowRejected: It is no string, or there are undecodable bytes in it.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.NOT_TEXT, f"A turn's text is a {type(text).__name__}.")
    if UNDECODABLE_MARK in text:
        raise RowRejected(Reason.UNDECODABLE, "A turn has bytes that are not UTF-8.")
    # White space before a text stays on its first line: it may be the indentation of code.
    return encodable(text).replace("\0", "").lstrip("\ufeff\r\n").rstrip()


def repair(turns: Sequence[tuple[Role, str]], max_characters: int) -> tuple[Message, ...]:
    """The turns, clean texts, as a conversation's messages.

    Raises:
        RowRejected: They are no conversation, or have more than `max_characters` characters.
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
    """Without empty system prompts, answers to nobody at the beginning, and empty turns at the end."""
    said = [(role, text) for role, text in turns if text or role != "system"]
    while said and not said[-1][1]:
        said.pop()
    first = next((index for index, (role, _) in enumerate(said) if role == "user"), len(said))
    return [turn for turn in said[:first] if turn[0] == "system"] + said[first:]


def _joined(said: Sequence[tuple[Role, str]]) -> tuple[Message, ...]:
    """One message per turn; consecutive ones of a role joined where that is what they mean."""
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
