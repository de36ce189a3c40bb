"""Special tokens that stand in the text of messages, such as `</s>` in a user's question about
tokenizers.

A tokenizer makes control tokens of them, and so a seed could end a turn or write another role's
header. Before the template is rendered each is replaced by a mark of a noncharacter, which no
template changes; the text around a mark is tokenized as usual, and the special token's own text in
two parts, neither of which is special. So the text stays what it was, and what the template itself
writes stays special.

Limit: special are the tokens that the tokenizer declares so. Of other added tokens, such as Qwen's
`<think>`, text and token are one, as in every engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.conversations.conversation import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd1"  # reserved for internal use, as its neighbour `UNDECODABLE_MARK`
MARKED = re.compile(f"{MARK}(\\d+){MARK}")


class SpecialText:
    """The special tokens of one tokenizer, as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special} | {
            *tokenizer.all_special_tokens
        }
        self._texts = sorted(
            (text for text in texts if text.strip()), key=lambda text: (-len(text), text)
        )
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._special = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def found(self, text: str) -> list[str]:
        """The special tokens in a text, each once."""
        return list(dict.fromkeys(self._special.findall(text)))

    def marked(self, text: str) -> str:
        """The text with a mark in place of each special token."""
        return self._special.sub(
            lambda match: f"{MARK}{self._index[match[0]]}{MARK}", text.replace(MARK, "\ufffd")
        )

    def restored(self, text: str) -> str:
        """The text with the special tokens in place of their marks."""
        return MARKED.sub(lambda match: self._texts[int(match[1])], text)

    def parts(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """What comes before the first mark, then each special token's text with what follows it."""
        first, *rest = MARKED.split(text)
        return first, [
            (self._texts[int(index)], after)
            for index, after in zip(rest[::2], rest[1::2], strict=True)
        ]

    def cuts(self, special: str) -> Iterator[tuple[str, str]]:
        """The ways to cut a special token's text in two that hold none themselves."""
        for at in range(1, len(special)):
            if not self._special.search(special[:at]) and not self._special.search(special[at:]):
                yield special[:at], special[at:]


def texts_of(messages: Sequence[Message]) -> str:
    """All texts of the messages."""
    return "\n".join(
        text for message in messages for text in (message.content, message.tool_calls or "")
    )
