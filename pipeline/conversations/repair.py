"""A dump's turns as a conversation's messages.

Turns are repaired where their meaning is clear: byte order marks, NULs and white space around a
text; empty or repeated system prompts; answers before the first question; an empty last answer; a
user's message that is repeated or split in two. Nothing is guessed: two different consecutive
answers mean that a question is missing, and the row is rejected; so is a function's result that no
call asks for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pipeline.conversations.conversation import Message, Reason, RowRejected
from pipeline.conversations.tool_turns import uses_tools

ToolPolicy = Literal["context", "cut", "quarantine"]


def repair(
    turns: Sequence[Message], max_characters: int, tools: ToolPolicy = "context"
) -> tuple[Message, ...]:
    """The turns, clean texts, as a conversation's messages.

    Args:
        tools: Whether calls and results of functions are kept, the conversation ends before them,
            or is rejected.

    Raises:
        RowRejected: They do not form a conversation, or have more than `max_characters` characters.
    """
    if not any(turn.content for turn in turns):
        raise RowRejected(Reason.EMPTY, "There is no text in it.")
    # Empty system prompts, answers before the first question, and empty turns at the end are
    # dropped.
    said = [turn for turn in turns if turn.content or turn.role != "system"]
    while said and not said[-1].content and not uses_tools(said[-1]):
        said.pop()
    first = next((index for index, turn in enumerate(said) if turn.role == "user"), len(said))
    said = [turn for turn in said[:first] if turn.role == "system"] + said[first:]
    if not any(turn.role == "user" for turn in said):
        raise RowRejected(Reason.NO_USER_TURN, "The user says nothing.")
    _require_text(said)
    messages = _without_tools(_joined(said), tools)
    num_characters = sum(
        len(message.content) + len(message.tool_calls or "") for message in messages
    )
    if num_characters > max_characters:
        detail = f"{num_characters:,} characters; seeds.max_characters is {max_characters:,}."
        raise RowRejected(Reason.TOO_LONG, detail)
    return messages


def _require_text(said: Sequence[Message]) -> None:
    for turn in said:
        if not turn.content and turn.tool_calls is None:
            what = (
                "A function's result has no text."
                if turn.role == "tool"
                else "A turn in the middle has no text."
            )
            raise RowRejected(Reason.EMPTY, what)


def _without_tools(messages: tuple[Message, ...], policy: ToolPolicy) -> tuple[Message, ...]:
    first = next((index for index, message in enumerate(messages) if uses_tools(message)), None)
    if first is None or policy == "context":
        return messages
    if policy == "quarantine":
        raise RowRejected(Reason.TOOLS, "It calls functions; seeds.tools is quarantine.")
    return messages[:first]


def _joined(said: Sequence[Message]) -> tuple[Message, ...]:
    """One message per turn; consecutive messages of a role are joined where that is their
    meaning.
    """
    questions_only = not any(turn.role == "assistant" for turn in said)
    messages: list[Message] = []
    for turn in said:
        last = messages[-1] if messages else None
        if turn.role == "system" and last and last.role != "system":
            raise RowRejected(Reason.WRONG_ORDER, "A system prompt stands after the first turn.")
        if turn.role == "tool" and not (last and uses_tools(last)):
            raise RowRejected(
                Reason.WRONG_ORDER, "A function's result stands where no function was called."
            )
        apart = turn.role == "tool" or (questions_only and turn.role == "user")
        if last is None or last.role != turn.role or apart:
            messages.append(turn)
        elif turn.role == "assistant" and (uses_tools(last) or uses_tools(turn)):
            messages[-1] = _one_call(last, turn)
        elif turn.role == "assistant" and last.content != turn.content:
            raise RowRejected(
                Reason.WRONG_ORDER, "Two answers stand in a row: a question is missing."
            )
        elif last.content != turn.content:
            messages[-1] = replace(turn, content=f"{last.content}\n\n{turn.content}")
    return tuple(messages)


def _one_call(last: Message, turn: Message) -> Message:
    """Calls in a row, or a text and its call, as one message."""
    calls = [call for message in (last, turn) for call in json.loads(message.tool_calls or "[]")]
    text = "\n\n".join(filter(None, (last.content, turn.content)))
    return Message("assistant", text, json.dumps(calls, ensure_ascii=False))
