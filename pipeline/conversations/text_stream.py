"""Tokens in, text out as soon as it is whole: what a person may be shown while a text is being written.

A character can take several tokens, and a token's text can depend on the one before it (a leading space). So text is
always decoded together with the token before it, and held back while it ends within a character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no character yet


class TextStream:
    """The text of one growing list of tokens: its pieces, joined, are the list's. Special tokens have none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last ids whose text is out: the context of the next ones
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token makes whole, its own and that of tokens held back before it; often empty."""
        self._held.append(token_id)
        text = self._new_text()
        return "" if text.endswith(UNFINISHED) else self._release(text)

    def flush(self) -> str:
        """What is still held back when no token follows: half a character, as the tokenizer shows it."""
        return self._release(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._held)[len(before) :]

    def _release(self, text: str) -> str:
        if text:
            self._shown, self._held = self._held, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
