"""Repair of a dump's turns: texts, function calls, and the order of turns.

Turns are repaired if their meaning is clear: byte order marks, NULs and white space around a text;
empty or repeated system prompts; answers before the first question; an empty last answer; a user's
message that is repeated or split in two. A row with an unclear meaning is rejected, for example one
with two different consecutive answers (a question is missing), or a function's result without a
call.

Function calls are read as OpenAI and LLaMA-Factory write them, and kept as a JSON list of
`{"name", "arguments"}`:

    OpenAI         {"role": "assistant", "tool_calls": [{"function": {"name", "arguments"}}]}
                   {"role": "tool", "content": "..."}
    LLaMA-Factory  {"from": "function_call", "value": '{"name", "arguments"}'}
                   {"from": "observation", "value": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pipeline.conversations.conversation import Message, Reason, RowRejected, utf8_text

ToolPolicy = Literal["context", "cut", "quarantine"]


def clean_text(text: Any) -> str:
    """Remove NULs, leading byte order marks and trailing white space from a seed turn's text.

    Leading line ends are removed too; leading spaces and tabs are kept, since they may indent code.

    Raises:
        RowRejected: The text is not a string, or is undecodable.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.NOT_TEXT, f"A turn's text is a {type(text).__name__}.")
    # Leading white space of the first line may be the indentation of code.
    return utf8_text(text).replace("\0", "").lstrip("\ufeff\r\n").rstrip()


def joined_parts(parts: list[Any]) -> str:
    """Join the text parts of a seed message in OpenAI's format.

    Raises:
        RowRejected: A part is not text.
    """
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            detail = f"A turn has a part that is not text: {str(part)[:60]}."
            raise RowRejected(Reason.NOT_TEXT, detail)
        texts.append(text)
    return "".join(texts)


def parsed_json(text: Any, what: str) -> Any:
    """Parse JSON that a seed row holds as text.

    Raises:
        RowRejected: The text is not JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejected(Reason.BROKEN_JSON, f"{what} is not valid JSON: {error}.") from None


def calls_json(calls: Any) -> str:
    """Convert a seed turn's function calls to the JSON list of `Message.tool_calls`.

    Raises:
        RowRejected: A call has no name, is not JSON, or is undecodable.
    """
    found = []
    for function in _functions(calls):
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = parsed_json(arguments, "A function call")
        found.append({"name": function["name"], "arguments": arguments or {}})
    return _tool_json(found)


def definitions_json(tools: Any) -> str | None:
    """Convert a seed row's function definitions to chat templates' JSON list; None if empty.

    Raises:
        RowRejected: A definition has no name, is not JSON, or is undecodable.
    """
    if isinstance(tools, str) and tools:
        tools = parsed_json(tools, "`tools`")
    if not tools:
        return None
    offered = [{"type": "function", "function": function} for function in _functions(tools)]
    return _tool_json(offered)


def _functions(value: Any) -> list[dict[str, Any]]:
    """Extract a seed row's named functions from a list of them, or from one.

    Each function may be under the key `function`.

    Raises:
        RowRejected: A function has no name.
    """
    functions = []
    for item in value if isinstance(value, list) else [value]:
        function = item
        if isinstance(item, dict):
            function = item.get("function", item)
        name = function.get("name") if isinstance(function, dict) else None
        if not name or not isinstance(name, str):
            raise RowRejected(Reason.NOT_TEXT, "A function call or definition has no name.")
        functions.append(function)
    return functions


def _tool_json(value: Sequence[object]) -> str:
    """Serialize a seed row's function calls or definitions as JSON.

    Raises:
        RowRejected: A value is not JSON, or is undecodable.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        detail = f"A function call or definition is not JSON: {error}."
        raise RowRejected(Reason.BROKEN_JSON, detail) from None
    return utf8_text(text)


def repair_turns(
    turns: Sequence[Message], max_characters: int, tools: ToolPolicy
) -> tuple[Message, ...]:
    """Repair a seed row's turns into the messages of a conversation.

    Args:
        turns: The dump's turns, with clean texts.
        tools: Keep function calls (context), end the conversation before the first (cut), or reject
            the row (quarantine).

    Raises:
        RowRejected: The turns do not form a conversation, have more than `max_characters`
            characters, or call functions although `tools` is quarantine.
    """
    if not any(turn.content for turn in turns):
        raise RowRejected(Reason.EMPTY, "There is no text in it.")
    messages = _join_messages(_trim_turns(turns))
    uses_tools = [message.uses_tools for message in messages]
    if any(uses_tools) and tools == "quarantine":
        raise RowRejected(Reason.TOOLS, "It calls functions; seeds.tools is quarantine.")
    if any(uses_tools) and tools == "cut":
        messages = messages[: uses_tools.index(True)]
    num_characters = sum(len(message.text) for message in messages)
    if num_characters > max_characters:
        detail = f"{num_characters:,} characters; seeds.max_characters is {max_characters:,}."
        raise RowRejected(Reason.TOO_LONG, detail)
    return tuple(messages)


def _trim_turns(turns: Sequence[Message]) -> list[Message]:
    """Drop a seed row's empty system prompts, answers before a question, and empty last turns.

    Raises:
        RowRejected: The user says nothing, or another turn is empty.
    """
    kept: list[Message] = []
    asked = False
    for turn in turns:
        asked = asked or turn.role == "user"
        if (turn.content or turn.role != "system") and (asked or turn.role == "system"):
            kept.append(turn)
    while kept and not kept[-1].content and not kept[-1].uses_tools:
        kept.pop()
    if not any(turn.role == "user" for turn in kept):
        raise RowRejected(Reason.NO_USER_TURN, "The user says nothing.")
    if not all(turn.text for turn in kept):
        raise RowRejected(Reason.EMPTY, "A turn in the middle, or a function's result, is empty.")
    return kept


def _join_messages(turns: Sequence[Message]) -> list[Message]:
    """Join a seed row's consecutive messages of one role where the meaning is clear.

    A repeated message is dropped. In a row without answers, each user message stays a question of
    its own.

    Raises:
        RowRejected: Two different answers follow one another, a system prompt is not first, or a
            function's result has no call.
    """
    questions_only = not any(turn.role == "assistant" for turn in turns)
    messages: list[Message] = []
    for turn in turns:
        last = messages[-1] if messages else Message("system", "")
        if turn.role == "system" and last.role != "system":
            raise RowRejected(Reason.WRONG_ORDER, "A system prompt stands after the first turn.")
        if turn.role == "tool" and not last.uses_tools:
            raise RowRejected(Reason.WRONG_ORDER, "A function's result stands without a call.")
        apart = turn.role == "tool" or (questions_only and turn.role == "user")
        if not messages or last.role != turn.role or apart:
            messages.append(turn)
        elif last.uses_tools or turn.uses_tools:
            messages[-1] = _join_calls(last, turn)
        elif last.content != turn.content:
            if turn.role == "assistant":
                detail = "Two answers stand in a row: a question is missing."
                raise RowRejected(Reason.WRONG_ORDER, detail)
            messages[-1] = replace(turn, content=f"{last.content}\n\n{turn.content}")
    return messages


def _join_calls(last: Message, turn: Message) -> Message:
    """Join two assistant messages of a seed row, one or both with function calls, into one."""
    calls = json.loads(last.tool_calls or "[]") + json.loads(turn.tool_calls or "[]")
    text = f"{last.content}\n\n{turn.content}".strip("\n")
    return Message("assistant", text, json.dumps(calls, ensure_ascii=False))
