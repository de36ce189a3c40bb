"""Rows to leave out: duplicates, near-duplicates, and rows with a question of the check."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.conversations.conversation import Conversation, Message, Mode, Reason, RejectedRow

Nearness = Literal["keep", "quarantine", "minhash"]
Words = tuple[str, ...]

NUM_PERMUTATIONS = 128
NUM_BANDS = 32  # a pair of similarity 0.6 shares one of them with a probability of 0.99
SHINGLE_WORDS = 3
ANCHOR_WORDS = 5  # by which a question is looked up
FEWEST_WORDS = 8  # of a question within a longer text; a shorter one must be a whole message
WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@dataclass
class Deduplicator:
    """Rejects conversations of which generation reads the same as of an earlier one, across
    sources.

    Args:
        mode, rounds: The messages that generation reads, see `Conversation.read_by`.
        near: Texts that count as the same besides equal ones. quarantine: those that differ in
            case, punctuation and white space alone; minhash: also those whose sets of three
            consecutive words are similar.
        similarity: The lowest Jaccard similarity, as MinHash estimates it, of similar texts.
    """

    mode: Mode
    rounds: int | None = None
    near: Nearness = "keep"
    similarity: float = 0.8

    def __post_init__(self) -> None:
        self._first_seen: dict[bytes, str] = {}
        self._similar = SimilarTexts(self.similarity) if self.near == "minhash" else None

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """The conversation if it is new, otherwise a `RejectedRow` that names the earlier one."""
        read = conversation.read_by(self.mode, self.rounds)
        texts = []
        for message in read:
            content = message.content
            if self.near != "keep":
                content = plain(content)
            texts.append((message.role, content, message.tool_calls))
        digest = hashlib.sha256(json.dumps([texts, conversation.tools]).encode()).digest()
        first = self._first_seen.setdefault(digest, conversation.id)
        if first != conversation.id:
            return _rejected(conversation, Reason.DUPLICATE, f"The same as {first}.")
        if self._similar is not None:
            # System prompts recur.
            said = [turn.content for turn in read if turn.role in ("user", "assistant")]
            found = self._similar.first(conversation.id, said)
            if found is not None:
                detail = f"Similar to {found[0]}: about {found[1]:.2f}."
                return _rejected(conversation, Reason.DUPLICATE, detail)
        return conversation


class SimilarTexts:
    """The texts so far, by the MinHash of their sets of three consecutive words (Broder 1997), in
    bands (LSH).

    128 permutations estimate a similarity with a standard error of at most 0.045. About 1 KB of
    memory per text.
    """

    def __init__(self, similarity: float):
        from rensa import RMinHashLSH  # only where it is asked for

        self._similarity = similarity
        self._index = RMinHashLSH(
            threshold=similarity, num_perm=NUM_PERMUTATIONS, num_bands=NUM_BANDS
        )
        self._texts: list[tuple[str, Any]] = []  # id and MinHash

    def first(self, id: str, texts: Sequence[str]) -> tuple[str, float] | None:
        """The id of the first text that is similar to this one, and their similarity; a new text is
        added.
        """
        from rensa import RMinHash

        hashed = RMinHash(num_perm=NUM_PERMUTATIONS, seed=0)
        hashed.update(sorted(shingles(texts)))
        for number in sorted(self._index.query(hashed)):
            earlier, other = self._texts[number]
            similarity = hashed.jaccard(other)
            if similarity >= self._similarity:
                return earlier, similarity
        self._index.insert(len(self._texts), hashed)
        self._texts.append((id, hashed))
        return None


class CheckQuestions:
    """Finds conversations that hold a question of the check: as a message, or, from eight words on,
    within one.

    Case, punctuation and white space do not matter. The time is linear in a conversation's words.
    """

    def __init__(self, questions: Iterable[Conversation]):
        self._by_anchor: defaultdict[Words, list[tuple[Words, str]]] = defaultdict(list)
        for question in questions:
            for message in question.messages:
                words = words_of(message.content)
                if message.role == "user" and words:
                    self._by_anchor[words[:ANCHOR_WORDS]].append((words, question.id))

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """The conversation where it holds none, otherwise a `RejectedRow` that names the
        question.
        """
        for message in conversation.messages:
            found = self.held_by(message)
            if found is not None:
                detail = f"It holds the check's {found}."
                return _rejected(conversation, Reason.CONTAMINATED, detail)
        return conversation

    def held_by(self, message: Message) -> str | None:
        """The id of a question that a message holds."""
        words = words_of(message.content)
        for start in range(len(words)):
            for question, id in self._by_anchor.get(words[start : start + ANCHOR_WORDS], ()):
                enough = question == words or len(question) >= FEWEST_WORDS
                if enough and words[start : start + len(question)] == question:
                    return id
        return None


def _rejected(conversation: Conversation, reason: Reason, detail: str) -> RejectedRow:
    return RejectedRow(conversation.id, reason, detail, asdict(conversation))


def plain(text: str) -> str:
    """The text's letters and digits in lower case, with single spaces between them; the text itself
    where it has none.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[\W_]+", " ", folded).strip() or text


def words_of(text: str) -> Words:
    """The words of a text in lower case; each character of a script without spaces is one."""
    return tuple(WORDS.findall(unicodedata.normalize("NFKC", text).casefold()))


def shingles(texts: Iterable[str]) -> set[str]:
    """Every three consecutive words of each text; all words of a shorter one; a text without words
    itself.
    """
    found = set()
    for text in texts:
        words = words_of(text) or (text,)
        for start in range(max(1, len(words) - SHINGLE_WORDS + 1)):
            found.add(" ".join(words[start : start + SHINGLE_WORDS]))
    return found
