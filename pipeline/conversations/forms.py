"""Parse rows of conversation dumps in their usual forms: ShareGPT, OpenAI messages, Alpaca, ...

    sharegpt   {"conversations": [{"from": "human", "value": "..."}, ...]}
    messages   {"messages": [{"role": "user", "content": "..." or [{"type": "text",
               "text": "..."}]}, ...]}
    ultrachat  {"data": ["question", "answer", ...]}, or {"prompt": "...", "messages": [...]}
    turns      {"question_id": 81, "category": "writing", "turns": ["question", ...]}
    alpaca     {"instruction": "...", "input": "...", "output": "...",
               "history": [["question", "answer"], ...]}
    prompts    "question", {"prompt": "question"}, {"prompt": "question", "response": "answer"}

An answer is read under any name of `ANSWERS`. In any form, a turn's role and text may have the key
names of ShareGPT or of OpenAI, because dumps mix both. Turns are repaired in `repair`. To add a
form, add an entry of `FORM_KEYS`, a case in `_parse_turns`, and a value of
`seeds.sources[].format`.
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
    utf8_text,
)
from pipeline.conversations.repair import (
    calls_json,
    clean_text,
    definitions_json,
    joined_parts,
    parsed_json,
    repair_turns,
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
ANSWERS = ("output", "response", "completion")
ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id")
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
NOT_LEARNED = ("0", "0.0", "false")  # values of these marks, as text
LONG_TEXT = 100  # characters; a shorter one is a label or a name
OTHER_KEYS = ("input", "history", "system", "system_prompt", "tools", "functions", "category")
KNOWN_KEYS = (*FORM_KEYS.values(), *ANSWERS, *ID_KEYS, *OTHER_KEYS)
EXPECTED = (
    "conversations as ShareGPT (`conversations`), OpenAI `messages`, UltraChat (`data`), questions"
    " (`turns`), Alpaca (`instruction`) or prompts (`prompt`, or plain strings)"
)


@dataclass(frozen=True)
class RowSettings:
    """Settings for parsing the rows of seed files, from `seeds.sources[]`.

    `columns` maps keys of the known forms to columns of the file.
    """

    form: str = "auto"
    columns: Mapping[Any, str] | None = None


def read_row(row: Any, id: str, settings: RowSettings) -> Conversation | RejectedRow:
    """Parse one row of a seed file into a conversation or a rejected row."""
    try:
        return _parse_conversation(row, id, settings)
    except RowRejected as rejected:
        return RejectedRow.of(id, rejected, row)


def unread_texts(row: Any, settings: RowSettings) -> list[tuple[str, str]]:
    """Return the columns whose long texts are not read, each with the column of the question.

    Only the forms that have a column per text have such columns. A text that holds the question is
    a copy of what is read.
    """
    if not isinstance(row, dict) or settings.columns:
        return []
    form = _form_of(DumpObject(row), settings.form)
    asked = FORM_KEYS.get(form, "")
    question = row.get(asked)
    if form not in ("alpaca", "prompts") or not isinstance(question, str):
        return []
    unread = []
    for name, text in row.items():
        known = name in KNOWN_KEYS and (name, form) != ("input", "prompts")
        if not known and isinstance(text, str) and len(text) >= LONG_TEXT and question not in text:
            if " " in text or not text.isascii():  # no link, no encoded data
                unread.append((name, asked))
    return unread


def _parse_conversation(row: Any, id: str, settings: RowSettings) -> Conversation:
    """Parse one row of a seed file into a conversation with repaired turns.

    Raises:
        RowRejected: The row has no known form, cannot be repaired, or is too long.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {_describe(row)}.")
    found = DumpObject(row)
    if settings.columns:
        found = found.renamed(settings.columns)
    turns = _parse_turns(found, settings.form)
    if not any(turn.role == "system" and turn.content for turn in turns):
        prompt = found.first("system", "system_prompt")
        if isinstance(prompt, str):
            turns.insert(0, Message("system", clean_text(prompt)))
    messages = repair_turns(turns)
    tools = definitions_json(found.fields.get("tools") or found.fields.get("functions"))
    return Conversation(id, messages, found.name(*ID_KEYS), found.name("category"), tools)


@dataclass(frozen=True)
class DumpObject:
    """A JSON object of a seed file: a row or one of its turns."""

    fields: dict[str, Any]

    def __str__(self) -> str:
        return _describe(self.fields)

    def renamed(self, columns: Mapping[Any, str]) -> DumpObject:
        """Return the row with some of its columns renamed to the keys of known forms.

        Other columns keep their names, except that a renamed column alone decides the form. A row
        may lack a column, unless a form is known by it.

        Args:
            columns: The name of the column for each key.

        Raises:
            RowRejected: The row lacks a column that a form is known by.
        """
        renamed = dict(self.fields)
        if not columns.keys().isdisjoint(FORM_KEYS.values()):
            for key in FORM_KEYS.values():
                renamed.pop(key, None)
        for key, column in columns.items():
            if column in self.fields:
                renamed[key] = self.fields[column]
            elif key in FORM_KEYS.values():
                raise RowRejected(
                    Reason.UNKNOWN_FORMAT,
                    f"There is no column `{column[:40]}`; the row is {self}.",
                )
        return DumpObject(renamed)

    def first(self, *keys: str) -> Any:
        """Return the value of the first of these keys that is present and not null, or None."""
        for key in keys:
            if self.fields.get(key) is not None:
                return self.fields[key]
        return None

    def name(self, *keys: str) -> str | None:
        """Return the first non-empty text or integer under these keys, as text, or None.

        Raises:
            RowRejected: UTF-8 cannot encode the text.
        """
        for key in keys:
            value = self.fields.get(key)
            if isinstance(value, str | int) and value != "":
                return utf8_text(str(value))
        return None

    def items(self, key: str) -> list[Any]:
        """Return the list under a key, parsed if it is given as JSON text.

        Raises:
            RowRejected: There is no list under the key, or its text is not JSON.
        """
        value = self.fields.get(key)
        if isinstance(value, str):
            value = parsed_json(value, f"`{key}`")
        if not isinstance(value, list):
            raise RowRejected(
                Reason.UNKNOWN_FORMAT,
                f"Expected a list under `{key}`; the row is {self}.",
            )
        return value


def _describe(value: Any) -> str:
    """Describe a value by its keys or its type, for error messages."""
    if isinstance(value, dict) and value:
        keys = ", ".join(f"`{str(key)[:40]}`" for key in list(value)[:8])
        return f"an object with the keys {keys}"
    return f"a value of type {type(value).__name__}"


def _parse_turns(row: DumpObject, form: str) -> list[Message]:
    """Parse the turns of a row in the given form.

    Raises:
        RowRejected: The row or one of its turns does not have the form.
    """
    form = _form_of(row, form)
    if form == "sharegpt":
        return [_parse_turn(turn) for turn in row.items("conversations")]
    if form == "ultrachat" and row.first("data") is not None:
        return _alternating_turns(row.items("data"))
    if form in ("messages", "ultrachat"):
        return [_parse_turn(turn) for turn in row.items("messages")]
    if form == "turns":
        return [Message("user", clean_text(text)) for text in row.items("turns")]
    if form == "alpaca":
        return _alpaca_turns(row)
    prompt = row.first("prompt")
    if prompt is None:
        raise RowRejected(Reason.UNKNOWN_FORMAT, f"The row is {row}.")
    return _said("user", prompt) + _said("assistant", row.first(*ANSWERS))


def _form_of(row: DumpObject, form: str) -> str:
    """Return the form; for "auto", the first of `FORM_KEYS` whose key the row has."""
    if form == "auto":
        for known, key in FORM_KEYS.items():
            if row.first(key) is not None:
                return known
    return form


def _alternating_turns(texts: list[Any]) -> list[Message]:
    """Convert texts to alternating messages of user and assistant, user first."""
    turns = []
    for number, text in enumerate(texts):
        role: Role = "assistant" if number % 2 else "user"
        turns.append(Message(role, clean_text(text)))
    return turns


def _alpaca_turns(row: DumpObject) -> list[Message]:
    """Parse the turns of a row in Alpaca's form.

    Raises:
        RowRejected: The history is not a list of pairs, or a text is missing or no string.
    """
    turns = []
    for pair in row.items("history") if row.first("history") else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowRejected(
                Reason.UNKNOWN_FORMAT,
                "Expected pairs of a question and an answer under `history`.",
            )
        turns += _alternating_turns(pair)
    question = clean_text(row.first("instruction"))
    if row.first("input"):
        question = f"{question}\n\n{clean_text(row.first('input'))}"
    return [*turns, Message("user", question), *_said("assistant", row.first(*ANSWERS))]


def _said(role: Role, value: Any) -> list[Message]:
    """Convert a text of this role, or a list of turns with their own roles, to messages.

    Preference data has such lists. An empty value gives no message.
    """
    if not value:
        return []
    if isinstance(value, list):
        return [_parse_turn(turn) for turn in value]
    return [Message(role, clean_text(value))]


def _parse_turn(value: Any) -> Message:
    """Parse the role, the text and the function calls of a turn, and whether it is learned.

    Dumps that mix two forms have both `from` and `role`, and one of the two is null.

    Raises:
        RowRejected: The turn is no object, or has an unknown role, no text or invalid calls.
    """
    if not isinstance(value, dict):
        raise RowRejected(
            Reason.UNKNOWN_FORMAT,
            f"A turn is {_describe(value)}; expected an object with a role and a text.",
        )
    turn = DumpObject(value)
    name = str(turn.first("from", "role")).strip().lower()
    if name not in ROLES:
        raise RowRejected(
            Reason.UNKNOWN_FORMAT,
            f"A turn's role is {name[:40]!r}; known are {', '.join(ROLES)}.",
        )
    role = ROLES[name]
    content = turn.first("value", "content")
    if isinstance(content, list):
        content = joined_parts(content)
    calls = value.get("tool_calls") or value.get("function_call")
    if name in CALLING_ROLES:
        calls, content = parsed_json(content, "A function call"), None
    if role != "assistant":
        return Message(role, clean_text(content))
    calls = calls_json(calls) if calls else None
    if calls and not content:
        content = ""
    learned = all(str(value.get(key)).lower() not in NOT_LEARNED for key in MARKS)
    return Message(role, clean_text(content), calls, learned)
