"""Repair of a dump's turns: texts, function calls, and the order of turns.

Turns are repaired if their meaning is clear. These are removed: leading byte order marks, NULs and
trailing white space of a text; empty and repeated system prompts; answers before the first
question; an empty last turn; a repeated message. A user's message that is split in two is joined. A
row with an unclear meaning is rejected, for example one with two different consecutive answers (a
question is missing), or a function's result without a call.

Function calls are read in the formats of OpenAI and LLaMA-Factory, and kept as a JSON list of
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
from typing import Any

from pipeline.conversations.conversation import Message, Reason, RowRejected, utf8_text

MAX_CHARACTERS = 200_000  # of a conversation


def clean_text(text: Any) -> str:
    """Remove NULs, leading byte order marks and trailing white space from a turn's text.

    Leading line ends are removed too; leading spaces and tabs are kept, since they may indent code.

    Raises:
        RowRejected: The text is not a string, or UTF-8 cannot encode it.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.NOT_TEXT, f"A turn's text is a {type(text).__name__}.")
    return utf8_text(text).replace("\0", "").lstrip("\ufeff\r\n").rstrip()


def joined_parts(parts: list[Any]) -> str:
    """Join the text parts of a message in OpenAI's format into one text.

    Raises:
        RowRejected: A part is not text.
    """
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowRejected(
                Reason.NOT_TEXT,
                f"A turn has a part that is not text: {str(part)[:60]}.",
            )
        texts.append(text)
    return "".join(texts)


def parsed_json(text: Any, what: str) -> Any:
    """Parse a JSON text; `what` names it in the error.

    Raises:
        RowRejected: The text is not JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejected(Reason.BROKEN_JSON, f"{what} is not valid JSON: {error}.") from None


def calls_json(calls: Any) -> str:
    """Convert a turn's function calls to the JSON list of `Message.tool_calls`.

    Raises:
        RowRejected: A call has no name, is not JSON, or UTF-8 cannot encode it.
    """
    found = []
    for function in _functions(calls):
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = parsed_json(arguments, "A function call")
        found.append({"name": function["name"], "arguments": arguments or {}})
    return _tool_json(found)


def definitions_json(tools: Any) -> str | None:
    """Convert function definitions to the JSON list that chat templates take.

    Return None if there are none.

    Raises:
        RowRejected: A definition has no name, is not JSON, or UTF-8 cannot encode it.
    """
    if isinstance(tools, str) and tools:
        tools = parsed_json(tools, "`tools`")
    if not tools:
        return None
    offered = [{"type": "function", "function": function} for function in _functions(tools)]
    return _tool_json(offered)


def _functions(value: Any) -> list[dict[str, Any]]:
    """Return function calls or definitions as a list; `value` is a list of them or a single one.

    Each may be nested under the key `function`.

    Raises:
        RowRejected: An item is no object with a name.
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
    """Serialize function calls or definitions as JSON.

    Raises:
        RowRejected: JSON in UTF-8 cannot hold a value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RowRejected(
            Reason.BROKEN_JSON,
            f"A function call or definition is not JSON: {error}.",
        ) from None
    return utf8_text(text)


def repair_turns(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Repair a row's turns into the messages of a conversation.

    Args:
        turns: The row's turns, with texts from `clean_text`.

    Raises:
        RowRejected: The turns do not form a conversation, or have more than `MAX_CHARACTERS`
            characters.
    """
    if not any(turn.content for turn in turns):
        raise RowRejected(Reason.EMPTY, "The conversation has no text.")
    messages = _join_messages(_trim_turns(turns))
    num_characters = sum(len(message.text) for message in messages)
    if num_characters > MAX_CHARACTERS:
        raise RowRejected(
            Reason.TOO_LONG,
            f"The conversation has {num_characters:,} characters; the limit is {MAX_CHARACTERS:,}.",
        )
    return tuple(messages)


def _trim_turns(turns: Sequence[Message]) -> list[Message]:
    """Drop empty system prompts, empty last turns, and answers before the first question.

    Raises:
        RowRejected: No user turn is left, or another turn is empty.
    """
    kept = []
    asked = False
    for turn in turns:
        asked = asked or turn.role == "user"
        if (turn.content or turn.role != "system") and (asked or turn.role == "system"):
            kept.append(turn)
    while kept and not kept[-1].content and not kept[-1].uses_tools:
        kept.pop()
    if not any(turn.role == "user" for turn in kept):
        raise RowRejected(Reason.NO_USER_TURN, "There is no user message.")
    if not all(turn.text for turn in kept):
        raise RowRejected(Reason.EMPTY, "A turn in the middle, or a function's result, is empty.")
    return kept


def _join_messages(turns: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the same role.

    A message that equals the previous one is dropped. Two kinds of messages are never joined or
    dropped: results of function calls, and user messages of a conversation without any answer.

    Raises:
        RowRejected: Two different answers follow one another, a system prompt comes after another
            turn, or a function's result has no call.
    """
    questions_only = not any(turn.role == "assistant" for turn in turns)
    messages: list[Message] = []
    for turn in turns:
        last = messages[-1] if messages else Message("system", "")
        if turn.role == "system" and last.role != "system":
            raise RowRejected(Reason.WRONG_ORDER, "A system prompt follows the first turn.")
        if turn.role == "tool" and not last.uses_tools:
            raise RowRejected(Reason.WRONG_ORDER, "A function's result has no call.")
        apart = turn.role == "tool" or (questions_only and turn.role == "user")
        if not messages or last.role != turn.role or apart:
            messages.append(turn)
        elif last != turn:
            if turn.role == "assistant":
                raise RowRejected(
                    Reason.WRONG_ORDER,
                    "Two different messages of the assistant follow one another.",
                )
            messages[-1] = replace(turn, content=f"{last.content}\n\n{turn.content}")
    return messages
