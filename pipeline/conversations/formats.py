"""Formats of conversation dumps, one row at a time.

    sharegpt   {"conversations": [{"from": "human", "value": "..."}, ...]}
    ultrachat  {"data": ["question", "answer", ...]}, or {"prompt": "...", "messages": [...]}
    messages   {"messages": [{"role": "user", "content": "..." or [{"type": "text", "text": "..."}]}, ...]}
    turns      {"question_id": 81, "category": "writing", "turns": ["question", "question", ...]}
    prompts    "question", or {"prompt": "question"}

A turn's role and text may use the key names of either format: dumps mix them.

Turns are repaired where their meaning is clear: byte order marks, NULs, lone surrogates and white space around a text;
empty or repeated system prompts; answers before the first question; an empty last answer; a user's message that is
repeated or split in two. Nothing is guessed: two different consecutive answers mean that a question is missing, and the
row is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.conversations.conversation import (
    UNDECODABLE_MARK,
    Conversation,
    Message,
    Reason,
    RejectedRow,
    Role,
    RowRejected,
    encodable,
)

Turns = list[tuple[Role, str]]

EXPECTED = (
    "conversations as ShareGPT (`conversations`), UltraChat (`data`), OpenAI `messages`, "
    "questions (`turns`) or prompts (`prompt`, or plain strings)"
)

ROLES: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}

# In order of precedence: UltraChat's `prompt` + `messages` is read as messages.
FORM_OF_KEY = {
    "conversations": "sharegpt",
    "messages": "messages",
    "data": "ultrachat",
    "turns": "turns",
    "prompt": "prompts",
}

ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id")
KNOWN_KEYS = (*FORM_OF_KEY, *ID_KEYS, "system", "system_prompt", "category")


def read_row(row: Any, id: str, form: str, max_characters: int) -> Conversation | RejectedRow:
    """One row of a dump as a conversation, or as a rejected row."""
    try:
        turns = _TURNS[detect(row) if form == "auto" else form](row)
        messages = repair(turns, max_characters)
    except RowRejected as rejected:
        return RejectedRow.of(id, rejected, row)
    fields = row if isinstance(row, dict) else {}
    source_id = next((name for key in ID_KEYS if (name := _name(fields.get(key)))), None)
    return Conversation(id, messages, source_id, _name(fields.get("category")))


def detect(row: Any) -> str:
    """The format of a row, by its keys.

    Raises:
        RowRejected: No key is known.
    """
    if isinstance(row, str):
        return "prompts"
    if isinstance(row, dict):
        for key, form in FORM_OF_KEY.items():
            if row.get(key) is not None:
                return form
    raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {describe(row)}.")


def describe(row: Any) -> str:
    """A row's type or keys, for messages."""
    if isinstance(row, dict):
        keys = ", ".join(f"`{str(key)[:40]}`" for key in list(row)[:8])
        return encodable(f"an object with the keys {keys}") if keys else "an empty object"
    names = {str: "a string", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return "null" if row is None else names.get(type(row), f"a {type(row).__name__}")


def _messages(row: Any) -> Turns:
    turns = [_turn(turn) for turn in _list(row, "messages")]
    first = sum(role == "system" for role, _ in turns[:1])
    if isinstance(row.get("prompt"), str) and [role for role, _ in turns[first : first + 1]] != ["user"]:
        turns.insert(first, ("user", clean_text(row["prompt"])))
    return _with_system(row, turns)


def _ultrachat(row: Any) -> Turns:
    if isinstance(row, dict) and row.get("data") is None:
        return _messages(row)
    roles: Sequence[Role] = ("user", "assistant")
    return [(roles[index % 2], clean_text(text)) for index, text in enumerate(_list(row, "data"))]


def _prompt(row: Any) -> Turns:
    if isinstance(row, dict) and "prompt" in row:
        return _with_system(row, [("user", clean_text(row["prompt"]))])
    if isinstance(row, str):
        return [("user", clean_text(row))]
    raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {describe(row)}; expected a string, or one under `prompt`.")


_TURNS: dict[str, Callable[[Any], Turns]] = {
    "sharegpt": lambda row: _with_system(row, [_turn(turn) for turn in _list(row, "conversations")]),
    "ultrachat": _ultrachat,
    "messages": _messages,
    "turns": lambda row: _with_system(row, [("user", clean_text(text)) for text in _list(row, "turns")]),
    "prompts": _prompt,
}


def _list(row: Any, key: str) -> list[Any]:
    """The list under a key; in a table's cell it may be JSON, or one list for each key of its items."""
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRejected(Reason.BROKEN_JSON, f"The text under `{key}` is not valid JSON: {error}.") from None
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        found = describe(value) if isinstance(row, dict) and key in row else describe(row)
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"Expected a list under `{key}`, found {found}.")
    return value


def _turn(turn: Any) -> tuple[Role, str]:
    """A turn's role and clean text."""
    if not isinstance(turn, dict):
        detail = f"A turn is {describe(turn)}; expected an object with a role and a text."
        raise RowRejected(Reason.UNKNOWN_FORMAT, detail)
    # Mixed dumps have both keys of a pair, one of them null.
    name = turn["from"] if turn.get("from") is not None else turn.get("role")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"A turn's role is {str(name)[:40]!r}; known are {', '.join(ROLES)}.")
    return role, clean_text(_joined_parts(turn["value"] if turn.get("value") is not None else turn.get("content")))


def _joined_parts(content: Any) -> Any:
    """A content given in parts, joined to one text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else describe(part)
            raise RowRejected(Reason.NOT_TEXT, f"A turn has a part that is not text: {str(kind)[:40]}.")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _with_system(row: dict[str, Any], turns: Turns) -> Turns:
    """Add the system prompt that some dumps keep beside the turns."""
    prompt = next((row[key] for key in ("system", "system_prompt") if isinstance(row.get(key), str)), "")
    has_one = any(role == "system" and text for role, text in turns)
    return turns if has_one or not prompt else [("system", clean_text(prompt)), *turns]


def _name(value: Any) -> str | None:
    """An id or a category as a string, if it is one."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return encodable(str(value))


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
    # Empty system prompts, answers before the first question, and empty turns at the end are dropped.
    said = [(role, text) for role, text in turns if text or role != "system"]
    while said and not said[-1][1]:
        said.pop()
    first = next((index for index, (role, _) in enumerate(said) if role == "user"), len(said))
    said = [turn for turn in said[:first] if turn[0] == "system"] + said[first:]
    if not any(role == "user" for role, _ in said):
        raise RowRejected(Reason.NO_USER_TURN, "The user says nothing.")
    if any(not text for _, text in said):
        raise RowRejected(Reason.EMPTY, "A turn in the middle has no text.")
    messages = _joined(said)
    num_characters = sum(len(message.content) for message in messages)
    if num_characters > max_characters:
        detail = f"{num_characters:,} characters; seeds.max_characters is {max_characters:,}."
        raise RowRejected(Reason.TOO_LONG, detail)
    return messages


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
