"""Function calls and their results in conversations: how dumps write them, and how chat templates
are given them.

    OpenAI          {"role": "assistant", "tool_calls": [{"function": {"name", "arguments"}}]},
    {"role": "tool"} LLaMA-Factory   {"from": "function_call", "value": '{"name", "arguments"}'},
    {"from": "observation", "value"}

A message keeps its calls as JSON, a list of `{"name", "arguments"}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.conversations.conversation import Message, Reason, RowRejected, storable, utf8_text

MOST_LEVELS = 64
CALLING_ROLES = ("function_call", "tool_call")  # of ShareGPT: the turn's text is the call


def calls_of(turn: dict[str, Any], name: str, text: Any) -> str | None:
    """The calls of a turn as JSON, or None where it makes none.

    Args:
        name: The turn's role in the dump.
        text: Its content, which is the call in a turn of `CALLING_ROLES`.

    Raises:
        RowRejected: They are no calls.
    """
    found = (
        _parsed(text)
        if name in CALLING_ROLES
        else turn.get("tool_calls") or turn.get("function_call")
    )
    if not found:
        return None
    return _json([_call(call) for call in _listed(found)])


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise RowRejected(Reason.NOT_TEXT, "A function call has no name.")
    arguments = function.get("arguments", function.get("parameters"))
    return {
        "name": function["name"],
        "arguments": _parsed(arguments) if isinstance(arguments, str) else arguments or {},
    }


def _parsed(text: Any) -> Any:
    if not isinstance(text, str) or not text.strip():
        raise RowRejected(Reason.EMPTY, "A function call has no text.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(
            Reason.BROKEN_JSON, f"A function call is not valid JSON: {error}."
        ) from None


def definitions_of(row: dict[str, Any]) -> str | None:
    """The functions that a row offers, as a JSON list that templates take as `tools`; None where it
    offers none.

    Raises:
        RowRejected: They are no list of functions.
    """
    found = row.get("tools") or row.get("functions")
    if isinstance(found, str):
        found = _parsed(found) if found.strip() else None
    if not found:
        return None
    offered = [
        tool.get("function", tool) if isinstance(tool, dict) else None for tool in _listed(found)
    ]
    if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in offered):
        raise RowRejected(Reason.NOT_TEXT, "Under `tools` stands no list of functions with names.")
    return _json([{"type": "function", "function": tool} for tool in offered])


def _json(value: Any) -> str:
    """A value as JSON in UTF-8; levels below `MOST_LEVELS` would be more than a template can take.

    Raises:
        RowRejected: It is no JSON, nested too deeply, or undecodable.
    """
    try:
        text = utf8_text(
            json.dumps(value, ensure_ascii=False, allow_nan=False),
            "a function's call or definition",
        )
        if storable(value, MOST_LEVELS) == json.loads(text):
            return text
    except (ValueError, TypeError, RecursionError):
        pass
    raise RowRejected(
        Reason.BROKEN_JSON, "A function's call or definition is no JSON, or nested too deeply."
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def uses_tools(message: Message) -> bool:
    """Whether a message is a function's call or its result."""
    return message.role == "tool" or message.tool_calls is not None


def for_template(messages: Sequence[Message], marked: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages as chat templates take them; a call and its result share an id of nine
    characters, as Mistral asks.

    Args:
        marked: What is done to every text, see `special_text`.
    """
    given: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        said: dict[str, Any] = {"role": message.role, "content": marked(message.content)}
        if message.tool_calls is not None:
            calls = marked_values(json.loads(message.tool_calls), marked)
            ids = [f"call{number + index:05d}" for index in range(len(calls))]
            number += len(calls)
            open_calls = [(id, call["name"]) for id, call in zip(ids, calls, strict=True)]
            said["tool_calls"] = [
                {"type": "function", "id": id, "function": call}
                for id, call in zip(ids, calls, strict=True)
            ]
        elif message.role == "tool":
            id, name = open_calls.pop(0) if open_calls else ("call00000", "")
            said |= {"tool_call_id": id, "name": name}
        given.append(said)
    return given


def marked_values(value: Any, marked: Callable[[str], str]) -> Any:
    """JSON with every text in it marked, keys included."""
    if isinstance(value, str):
        return marked(value)
    if isinstance(value, dict):
        return {marked(key): marked_values(item, marked) for key, item in value.items()}
    return [marked_values(item, marked) for item in value] if isinstance(value, list) else value
