"""Messages as chat templates take them: special tokens in their text escaped, and calls with ids.

A tokenizer makes control tokens of a text such as `</s>` in a user's question, and so a seed could
end a turn or write another role's header. Before the template is rendered each is replaced by a
mark of a noncharacter, which no template changes; the text around a mark is tokenized as usual, and
the special token's own text in two parts, neither of which is special. So the text stays the same,
and special tokens of the template itself stay special.

Limit: special are the tokens that the tokenizer declares so. Of other added tokens, such as Qwen's
`<think>`, text and token are one, as in every engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.conversations.conversation import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd1"  # reserved for internal use, as its neighbour `UNDECODABLE_MARK`
MARKED = re.compile(f"{MARK}(\\d+){MARK}")


class SpecialText:
    """The special tokens of one tokenizer, as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        texts = set(tokenizer.all_special_tokens)
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                texts.add(token.content)
        by_length = sorted(texts, key=lambda text: (-len(text), text))
        self._texts = [text for text in by_length if text.strip()]
        self._special = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def found(self, text: str) -> list[str]:
        """The special tokens in a text, each once."""
        return list(dict.fromkeys(self._special.findall(text)))

    def marked(self, text: str) -> str:
        """The text with a mark in place of each special token."""
        return self._special.sub(
            lambda match: f"{MARK}{self._texts.index(match[0])}{MARK}", text.replace(MARK, "\ufffd")
        )

    def restored(self, text: str) -> str:
        """The text with the special tokens in place of their marks."""
        return MARKED.sub(lambda match: self._texts[int(match[1])], text)

    def parts(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The text before the first mark, then each special token's text with what follows it."""
        first, *rest = MARKED.split(text)
        specials = [self._texts[int(index)] for index in rest[::2]]
        return first, list(zip(specials, rest[1::2], strict=True))

    def cuts(self, special: str) -> Iterator[tuple[str, str]]:
        """The ways to cut a special token's text in two that hold none themselves."""
        for at in range(1, len(special)):
            if not self._special.search(special[:at]) and not self._special.search(special[at:]):
                yield special[:at], special[at:]


def for_template(messages: Sequence[Message], marked: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages as chat templates take them.

    A call and its result share an id of nine characters, as Mistral's template asks.

    Args:
        marked: Applied to every text, see `SpecialText.marked`.
    """
    given: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": marked(message.content)}
        if message.tool_calls is not None:
            open_calls = []
            fields["tool_calls"] = []
            for call in marked_values(json.loads(message.tool_calls), marked):
                id = f"call{number:05d}"
                number += 1
                open_calls.append((id, call["name"]))
                fields["tool_calls"].append({"type": "function", "id": id, "function": call})
        elif message.role == "tool":
            id, name = open_calls.pop(0) if open_calls else ("call00000", "")
            fields["tool_call_id"] = id
            fields["name"] = name
        given.append(fields)
    return given


def marked_values(value: Any, marked: Callable[[str], str]) -> Any:
    """JSON with every text in it marked, keys included."""
    if isinstance(value, str):
        return marked(value)
    if isinstance(value, dict):
        return {marked(key): marked_values(item, marked) for key, item in value.items()}
    if isinstance(value, list):
        return [marked_values(item, marked) for item in value]
    return value
