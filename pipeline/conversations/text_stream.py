"""Incremental decoding: tokens in, text out as soon as it is complete.

A character can take several tokens, and a token's text can depend on the one before it (a leading
space). Text is therefore decoded together with the preceding token, and held back while it ends
within a character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the decoded text of an incomplete character


class TextStream:
    """The text of a growing list of tokens, in pieces; special tokens have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._shown: list[
            int
        ] = []  # the last ids whose text was returned: the context of the next ones
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text completed by this token, including that of tokens held back before it; may be
        empty.
        """
        self._held.append(token_id)
        text = self._new_text()
        return "" if text.endswith(UNFINISHED) else self._release(text)

    def flush(self) -> str:
        """The text held back, when no token follows: an incomplete character as the tokenizer
        decodes it.
        """
        return self._release(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._held)[len(before) :]

    def _release(self, text: str) -> str:
        if text:
            self._shown, self._held = self._held, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
