"""Formats of conversation dumps, one row at a time.

    sharegpt   {"conversations": [{"from": "human", "value": "..."}, ...]}
    messages   {"messages": [{"role": "user", "content": "..." or [{"type": "text", "text":
    "..."}]}, ...]} ultrachat  {"data": ["question", "answer", ...]}, or {"prompt": "...",
    "messages": [...]} turns      {"question_id": 81, "category": "writing", "turns": ["question",
    "question", ...]} alpaca     {"instruction": "...", "input": "...", "output": "...", "history":
    [["question", "answer"], ...]} prompts    "question", {"prompt": "question"}, {"prompt":
    "question", "response": "answer"}

A turn's role and text may use the key names of either format: dumps mix them. What is repaired in
turns, `repair` says. A new format is one entry of `FORMS`, and its name in
`seeds.sources[].format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from pipeline.conversations.message_text import clean_text, joined_parts
from pipeline.conversations.repair import ToolPolicy, repair
from pipeline.conversations.tool_turns import CALLING_ROLES, calls_of, definitions_of

ROLES: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "model", "chatgpt", "bing", "bard", *CALLING_ROLES), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), "tool"),
}
ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id")
SYSTEM_KEYS = ("system", "system_prompt")
ANSWER_KEYS = ("response", "completion")


@dataclass(frozen=True)
class Form:
    """One format: the key that tells its rows, the other keys that it reads, and how a row's turns
    are read.
    """

    key: str
    turns: Callable[[Any], list[Message]]
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowSettings:
    """How rows are read; of `seeds` and of `seeds.sources[]` in the configuration."""

    form: str = "auto"
    max_characters: int = 200_000
    tools: ToolPolicy = "context"
    columns: Mapping[str, str] | None = None


def read_row(row: Any, id: str, settings: RowSettings) -> Conversation | RejectedRow:
    """One row of a dump as a conversation, or as a rejected row."""
    try:
        found = named(row, settings.columns) if settings.columns else row
        form = FORMS[detect(found) if settings.form == "auto" else settings.form]
        messages = repair(form.turns(found), settings.max_characters, settings.tools)
        fields = found if isinstance(found, dict) else {}
        tools = definitions_of(fields) if settings.tools == "context" else None
        source_id = next((name for key in ID_KEYS if (name := _name(fields.get(key), key))), None)
        category = _name(fields.get("category"), "category")
    except RowRejected as rejected:
        return RejectedRow.of(id, rejected, row)
    return Conversation(id, messages, source_id, category, tools)


def named(row: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of other column names under the keys that formats know.

    Raises:
        RowRejected: A column is not there.
    """
    missing = next(
        (name for name in columns.values() if not isinstance(row, dict) or name not in row), None
    )
    if missing is not None:
        raise RowRejected(
            Reason.UNKNOWN_FORMAT,
            f"There is no column `{missing[:40]}`; the row is {describe(row)}.",
        )
    return {key: row[name] for key, name in columns.items()}


def detect(row: Any) -> str:
    """The format of a row, by its keys.

    Raises:
        RowRejected: No key is known.
    """
    if isinstance(row, str):
        return "prompts"
    if isinstance(row, dict):
        for name, form in FORMS.items():
            if row.get(form.key) is not None:
                return name
    raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {describe(row)}.")


def describe(row: Any) -> str:
    """A row's type or keys, for messages."""
    if isinstance(row, dict):
        keys = ", ".join(f"`{str(key)[:40]}`" for key in list(row)[:8])
        return encodable(f"an object with the keys {keys}") if keys else "an empty object"
    names = {
        str: "a string",
        list: "a list",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "null" if row is None else names.get(type(row), f"a {type(row).__name__}")


def _sharegpt(row: Any) -> list[Message]:
    return _with_system(row, [_turn(turn) for turn in _list(row, "conversations")])


def _messages(row: Any) -> list[Message]:
    turns = [_turn(turn) for turn in _list(row, "messages")]
    first = sum(turn.role == "system" for turn in turns[:1])
    if isinstance(row.get("prompt"), str) and [turn.role for turn in turns[first : first + 1]] != [
        "user"
    ]:
        turns.insert(first, _said("user", row["prompt"]))
    return _with_system(row, turns)


def _ultrachat(row: Any) -> list[Message]:
    if isinstance(row, dict) and row.get("data") is None:
        return _messages(row)
    return _alternating(_list(row, "data"))


def _alternating(texts: Sequence[Any]) -> list[Message]:
    roles: Sequence[Role] = ("user", "assistant")
    return [_said(roles[index % 2], text) for index, text in enumerate(texts)]


def _questions(row: Any) -> list[Message]:
    return _with_system(row, [_said("user", text) for text in _list(row, "turns")])


def _alpaca(row: Any) -> list[Message]:
    if not isinstance(row, dict) or not isinstance(row.get("instruction"), str):
        raise RowRejected(
            Reason.UNKNOWN_FORMAT, f"Expected a text under `instruction`, found {describe(row)}."
        )
    earlier = _list(row, "history") if row.get("history") else []
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in earlier):
        raise RowRejected(
            Reason.UNKNOWN_FORMAT, "Expected pairs of a question and an answer under `history`."
        )
    asked = [
        text for text in (row["instruction"], row.get("input")) if text is not None and text != ""
    ]
    question = "\n\n".join(clean_text(text) for text in asked)
    turns = [*_alternating([text for turn in earlier for text in turn]), Message("user", question)]
    return _with_system(row, [*turns, *_answer(row.get("output"))])


def _prompt(row: Any) -> list[Message]:
    if isinstance(row, str):
        return [_said("user", row)]
    if not isinstance(row, dict) or "prompt" not in row:
        what = f"The row is {describe(row)}; expected a string, or one under `prompt`."
        raise RowRejected(Reason.UNKNOWN_FORMAT, what)
    answer = next((row[key] for key in ANSWER_KEYS if row.get(key) is not None), None)
    return _with_system(
        row, _turns_or_text(row["prompt"], "user") + _turns_or_text(answer, "assistant")
    )


FORMS = {  # in order of precedence: UltraChat's `prompt` + `messages` is read as messages
    "sharegpt": Form("conversations", _sharegpt),
    "messages": Form("messages", _messages),
    "ultrachat": Form("data", _ultrachat),
    "turns": Form("turns", _questions),
    "alpaca": Form("instruction", _alpaca, ("input", "output", "history")),
    "prompts": Form("prompt", _prompt, ANSWER_KEYS),
}
KNOWN_KEYS = (
    *(key for form in FORMS.values() for key in (form.key, *form.also)),
    *(*ID_KEYS, *SYSTEM_KEYS, "category", "tools", "functions"),
)
EXPECTED = (
    "conversations as ShareGPT (`conversations`), OpenAI `messages`, UltraChat (`data`), questions"
    " (`turns`), Alpaca (`instruction`) or prompts (`prompt`, or plain strings);"
    " seeds.sources[].columns names columns of other names"
)


def _turns_or_text(value: Any, role: Role) -> list[Message]:
    """Turns, where a list of them stands in a text's place, as in data of preferences."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(turn, dict) and "role" in turn for turn in value)
    ):
        return [_turn(turn) for turn in value]
    return _answer(value) if role == "assistant" else [_said(role, value)]


def _answer(value: Any) -> list[Message]:
    return [] if value is None or value == "" else [_said("assistant", value)]


def _said(role: Role, text: Any) -> Message:
    return Message(role, clean_text(text))


def _list(row: Any, key: str) -> list[Any]:
    """The list under a key; in a table's cell it may be JSON, or one list for each key of its
    items.
    """
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRejected(
                Reason.BROKEN_JSON, f"The text under `{key}` is not valid JSON: {error}."
            ) from None
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(column, list) for column in value.values())
    ):
        value = [
            dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)
        ]
    if not isinstance(value, list):
        found = describe(value) if isinstance(row, dict) and key in row else describe(row)
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"Expected a list under `{key}`, found {found}.")
    return value


def _turn(turn: Any) -> Message:
    """A turn's role, clean text and calls."""
    if not isinstance(turn, dict):
        detail = f"A turn is {describe(turn)}; expected an object with a role and a text."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    # Mixed dumps have both keys of a pair, one of them null.
    name = turn["from"] if turn.get("from") is not None else turn.get("role")
    if not isinstance(name, str) or (role := ROLES.get(name := name.strip().lower())) is None:
        raise RowRejected(
            Reason.UNKNOWN_FORMAT,
            f"A turn's role is {str(name)[:40]!r}; known are {', '.join(ROLES)}.",
        )
    content = joined_parts(turn["value"] if turn.get("value") is not None else turn.get("content"))
    calls = calls_of(turn, name, content) if role == "assistant" else None
    if calls is not None and (content is None or name in CALLING_ROLES):
        content = ""
    return Message(role, clean_text(content), calls)


def _with_system(row: Any, turns: list[Message]) -> list[Message]:
    """Add the system prompt that some dumps keep beside the turns."""
    fields = row if isinstance(row, dict) else {}
    prompt = next((fields[key] for key in SYSTEM_KEYS if isinstance(fields.get(key), str)), "")
    has_one = any(turn.role == "system" and turn.content for turn in turns)
    return turns if has_one or not prompt else [_said("system", prompt), *turns]


def _name(value: Any, key: str) -> str | None:
    """An id or a category as a string, if it is one."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return utf8_text(str(value), f"`{key}`")
