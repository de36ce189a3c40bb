"""Forms of conversation dumps, one row at a time.

    sharegpt   {"conversations": [{"from": "human", "value": "..."}, ...]}
    messages   {"messages": [{"role": "user", "content": "..." or [{"type": "text",
               "text": "..."}]}, ...]}
    ultrachat  {"data": ["question", "answer", ...]}, or {"prompt": "...", "messages": [...]}
    turns      {"question_id": 81, "category": "writing", "turns": ["question", ...]}
    alpaca     {"instruction": "...", "input": "...", "output": "...",
               "history": [["question", "answer"], ...]}
    prompts    "question", {"prompt": "question"}, {"prompt": "question", "response": "answer"}

A turn's role and text may use the key names of either format: dumps mix them. What is repaired in
turns, `repair` says. A new form is one entry of `FORM_KEYS`, its case in `_turns_of`, and its name
in `seeds.sources[].format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.conversations.conversation import (
    Conversation,
    Message,
    Reason,
    RejectedRow,
    Role,
    RowRejected,
    encodable,
    utf8_text,
)
from pipeline.conversations.repair import (
    ToolPolicy,
    calls_json,
    clean_text,
    definitions_json,
    joined_parts,
    parsed_json,
    repair,
)

CALLING_ROLES = ("function_call", "tool_call")  # of ShareGPT: the turn's text is the call
ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
# The key that identifies a form's rows, in order of precedence: UltraChat's `prompt` + `messages`
# is read as messages.
FORM_KEYS = {
    "sharegpt": "conversations",
    "messages": "messages",
    "ultrachat": "data",
    "turns": "turns",
    "alpaca": "instruction",
    "prompts": "prompt",
}
ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id")
SYSTEM_KEYS = ("system", "system_prompt")
ANSWER_KEYS = ("response", "completion")
KNOWN_KEYS = (
    *(*FORM_KEYS.values(), *ID_KEYS, *SYSTEM_KEYS, *ANSWER_KEYS),
    *("input", "output", "history", "tools", "functions", "category"),
)
EXPECTED = (
    "conversations as ShareGPT (`conversations`), OpenAI `messages`, UltraChat (`data`), questions"
    " (`turns`), Alpaca (`instruction`) or prompts (`prompt`, or plain strings);"
    " seeds.sources[].columns names columns of other names"
)


@dataclass(frozen=True)
class RowSettings:
    """How rows are read: settings of `seeds` and of `seeds.sources[]`."""

    form: str = "auto"
    max_characters: int = 200_000
    tools: ToolPolicy = "context"
    columns: Mapping[Any, str] | None = None


def read_row(row: Any, id: str, settings: RowSettings) -> Conversation | RejectedRow:
    """One row of a dump as a conversation, or as a rejected row."""
    try:
        return _conversation(row, id, settings)
    except RowRejected as rejected:
        return RejectedRow.of(id, rejected, row)


def _conversation(row: Any, id: str, settings: RowSettings) -> Conversation:
    fields = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(fields, dict):
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {describe(row)}.")
    if settings.columns:
        fields = _renamed(fields, settings.columns)
    form = _detected(fields) if settings.form == "auto" else settings.form
    turns = _turns_of(fields, form)
    if not any(turn.role == "system" and turn.content for turn in turns):
        prompt = _first(fields, SYSTEM_KEYS)
        if isinstance(prompt, str):
            turns.insert(0, Message("system", clean_text(prompt)))
    messages = repair(turns, settings.max_characters, settings.tools)
    tools = None
    if settings.tools == "context":
        tools = definitions_json(fields.get("tools") or fields.get("functions"))
    names = (_name(fields.get(key), key) for key in ID_KEYS)
    source_id = next((name for name in names if name is not None), None)
    return Conversation(id, messages, source_id, _name(fields.get("category"), "category"), tools)


def _renamed(fields: dict[str, Any], columns: Mapping[Any, str]) -> dict[str, Any]:
    """A row of other column names under the keys that the forms know."""
    renamed = {}
    for key, column in columns.items():
        if column not in fields:
            detail = f"There is no column `{column[:40]}`; the row is {describe(fields)}."
            raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
        renamed[key] = fields[column]
    return renamed


def _detected(fields: dict[str, Any]) -> str:
    for form, key in FORM_KEYS.items():
        if fields.get(key) is not None:
            return form
    raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {describe(fields)}.")


def describe(value: Any) -> str:
    """A value's type or keys, for messages."""
    if isinstance(value, dict) and value:
        keys = ", ".join(f"`{str(key)[:40]}`" for key in list(value)[:8])
        return encodable(f"an object with the keys {keys}")
    names = {"NoneType": "null", "str": "a string", "int": "a number", "float": "a number"}
    kind = type(value).__name__
    return names.get(kind, f"a {kind}")


def _turns_of(fields: dict[str, Any], form: str) -> list[Message]:
    """The turns of a row of this form, as clean texts."""
    if form == "sharegpt":
        return [_turn(turn) for turn in _list(fields, "conversations")]
    if form == "messages" or (form == "ultrachat" and fields.get("data") is None):
        return _messages(fields)
    if form == "ultrachat":
        return _alternating(_list(fields, "data"))
    if form == "turns":
        return [Message("user", clean_text(text)) for text in _list(fields, "turns")]
    if form == "alpaca":
        return _alpaca(fields)
    if "prompt" not in fields:
        detail = f"Expected a string or `prompt`; the row is {describe(fields)}."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    answer = _first(fields, ANSWER_KEYS)
    return _said("user", fields["prompt"]) + _said("assistant", answer)


def _messages(fields: dict[str, Any]) -> list[Message]:
    """OpenAI messages; the first question may be missing there and stand under `prompt`."""
    turns = [_turn(turn) for turn in _list(fields, "messages")]
    first = 1 if turns and turns[0].role == "system" else 0
    has_question = len(turns) > first and turns[first].role == "user"
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and not has_question:
        turns.insert(first, Message("user", clean_text(prompt)))
    return turns


def _alternating(texts: list[Any]) -> list[Message]:
    turns = []
    for number, text in enumerate(texts):
        role: Role = "assistant" if number % 2 else "user"
        turns.append(Message(role, clean_text(text)))
    return turns


def _alpaca(fields: dict[str, Any]) -> list[Message]:
    instruction = fields.get("instruction")
    if not isinstance(instruction, str):
        detail = f"Expected a text under `instruction`; the row is {describe(fields)}."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    turns = []
    for pair in _list(fields, "history") if fields.get("history") else ():
        if not isinstance(pair, list) or len(pair) != 2:
            detail = "Expected pairs of a question and an answer under `history`."
            raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
        turns += _alternating(pair)
    question = clean_text(instruction)
    if fields.get("input") not in (None, ""):
        question = f"{question}\n\n{clean_text(fields['input'])}"
    return [*turns, Message("user", question), *_said("assistant", fields.get("output"))]


def _said(role: Role, value: Any) -> list[Message]:
    """A text as one turn, or the turns that stand in its place in data of preferences."""
    if value is None or value == "":
        return []
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return [_turn(turn) for turn in value]
    return [Message(role, clean_text(value))]


def _turn(turn: Any) -> Message:
    """A turn's role, clean text and calls; mixed dumps have both keys of a pair, one of them
    null.
    """
    if not isinstance(turn, dict):
        detail = f"A turn is {describe(turn)}; expected an object with a role and a text."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    name = str(_first(turn, ("from", "role"))).strip().lower()
    if name not in ROLES:
        detail = f"A turn's role is {name[:40]!r}; known are {', '.join(ROLES)}."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    role = ROLES[name]
    content = _first(turn, ("value", "content"))
    if isinstance(content, list):
        content = joined_parts(content)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if name in CALLING_ROLES:
        calls, content = parsed_json(content, "A function call"), None
    if role == "assistant" and calls:
        return Message(role, clean_text(content or ""), calls_json(calls))
    return Message(role, clean_text(content))


def _list(fields: dict[str, Any], key: str) -> list[Any]:
    """The list under a key; a table's cell may hold it as JSON, or as one list for each key of its
    items.
    """
    value = fields.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed_json(value, f"`{key}`")
    if isinstance(value, dict) and value and all(isinstance(of, list) for of in value.values()):
        columns = zip(*value.values(), strict=False)
        value = [dict(zip(value, items, strict=True)) for items in columns]
    if not isinstance(value, list):
        found = describe(value if key in fields else fields)
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"Expected a list under `{key}`, found {found}.")
    return value


def _first(fields: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of these keys that has one."""
    for key in keys:
        if fields.get(key) is not None:
            return fields[key]
    return None


def _name(value: Any, key: str) -> str | None:
    """An id or a category as a string, if it is one."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return utf8_text(str(value), f"`{key}`")
