"""Rows that are not to be trained on twice, or not at all: duplicates, near-duplicates, and the
check's questions.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Literal

from pipeline.conversations.conversation import Conversation, Message, Mode, Reason, RejectedRow

Nearness = Literal["keep", "quarantine", "minhash"]

NUM_PERMUTATIONS = 128
FOUND = 0.99  # the probability with which a pair that is just similar enough shares a band
SHINGLE_WORDS = 3
ANCHOR_WORDS = 5  # by which a question is looked up
# of a question that counts as one within a longer text; a shorter one must be a whole message
FEWEST_WORDS = 8
WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


class Deduplicator:
    """Rejects conversations of which the generation reads what it has read before, across sources.

    Args:
        mode, rounds: What is read, see `Conversation.read_by`.
        near: Which texts count as the same besides equal ones. quarantine: those that differ in
            case, punctuation and white space alone; minhash: also those whose sets of three words
            in a row are similar.
        similarity: From which Jaccard similarity on, as MinHash estimates it.
    """

    def __init__(
        self,
        mode: Mode,
        rounds: int | None = None,
        *,
        near: Nearness = "keep",
        similarity: float = 0.8,
    ):
        self._mode, self._rounds, self._near = mode, rounds, near != "keep"
        self._first_seen: dict[bytes, str] = {}
        self._similar = SimilarTexts(similarity) if near == "minhash" else None

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """The conversation itself where what is read of it is new, otherwise a `RejectedRow` that
        names the first.
        """
        read = conversation.read_by(self._mode, self._rounds)
        texts = [
            (message.role, plain(message.content) if self._near else message.content)
            for message in read
        ]
        called = [message.tool_calls for message in read if message.tool_calls]
        digest = hashlib.sha256(json.dumps([texts, called, conversation.tools]).encode()).digest()
        first = self._first_seen.setdefault(digest, conversation.id)
        if first != conversation.id:
            return _rejected(conversation, Reason.DUPLICATE, f"The same as {first}.")
        said = [
            message.content for message in read if message.role in ("user", "assistant")
        ]  # system prompts recur
        if self._similar and (found := self._similar.first(conversation.id, said)):
            return _rejected(
                conversation, Reason.DUPLICATE, f"Similar to {found[0]}: about {found[1]:.2f}."
            )
        return conversation


class SimilarTexts:
    """The texts so far, by the MinHash of their sets of three words in a row (Broder 1997), in
    bands (LSH).

    128 permutations estimate a similarity with a standard error of at most 0.045. About 1 KB of
    memory per text.
    """

    def __init__(self, similarity: float):
        from rensa import RMinHashLSH  # for those who ask for it

        self._similarity, self._ids = similarity, list[str]()
        self._index = RMinHashLSH(
            threshold=similarity, num_perm=NUM_PERMUTATIONS, num_bands=num_bands(similarity)
        )
        self._hashes: list[object] = []

    def first(self, id: str, texts: Sequence[str]) -> tuple[str, float] | None:
        """The id of the first text that this one is similar to, and how much; otherwise it is
        remembered.
        """
        from rensa import RMinHash

        hashed = RMinHash(num_perm=NUM_PERMUTATIONS, seed=0)
        hashed.update(sorted(shingles(texts)))
        for number in sorted(self._index.query(hashed)):
            if (similarity := hashed.jaccard(self._hashes[number])) >= self._similarity:
                return self._ids[number], similarity
        self._index.insert(len(self._ids), hashed)
        self._ids.append(id)
        self._hashes.append(hashed)
        return None


def num_bands(similarity: float) -> int:
    """The fewest bands of which a pair of this similarity shares one with probability `FOUND`."""

    def found(bands: int) -> float:
        return 1 - (1 - similarity ** (NUM_PERMUTATIONS // bands)) ** bands

    return next((bands for bands in (4, 8, 16, 32, 64) if found(bands) >= FOUND), NUM_PERMUTATIONS)


class CheckQuestions:
    """Finds conversations that hold a question of the check: as a message, or, from eight words on,
    within one.

    Case, punctuation and white space do not matter. A conversation is looked at in time linear in
    its words.
    """

    def __init__(self, questions: Iterable[Conversation]):
        self._whole: dict[tuple[str, ...], str] = {}
        self._within: defaultdict[tuple[str, ...], list[tuple[tuple[str, ...], str]]] = defaultdict(
            list
        )
        for question in questions:
            for message in question.messages:
                if message.role == "user" and (words := words_of(message.content)):
                    self._whole.setdefault(words, question.id)
                    if len(words) >= FEWEST_WORDS:
                        self._within[words[:ANCHOR_WORDS]].append((words, question.id))

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """The conversation itself where it holds none, otherwise a `RejectedRow` that names the
        question.
        """
        found = next(
            (id for message in conversation.messages if (id := self.held_by(message))), None
        )
        return (
            _rejected(conversation, Reason.CONTAMINATED, f"It holds the check's {found}.")
            if found
            else conversation
        )

    def held_by(self, message: Message) -> str | None:
        """The id of a question that a message holds."""
        words = words_of(message.content)
        if words in self._whole:
            return self._whole[words]
        for start in range(len(words) - FEWEST_WORDS + 1):
            for question, id in self._within.get(words[start : start + ANCHOR_WORDS], ()):
                if words[start : start + len(question)] == question:
                    return id
        return None


def _rejected(conversation: Conversation, reason: Reason, detail: str) -> RejectedRow:
    return RejectedRow(conversation.id, reason, detail, asdict(conversation))


def plain(text: str) -> str:
    """The text's letters and digits in lower case, with one space for all that is between them;
    else the text.
    """
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip() or text


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case; of a script without spaces each character."""
    return tuple(WORDS.findall(unicodedata.normalize("NFKC", text).casefold()))


def shingles(texts: Iterable[str]) -> set[str]:
    """Every three words in a row of each text; all words of a shorter one; a text without words
    itself.
    """
    found = set()
    for text in texts:
        words = words_of(text) or (text,)
        starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
        found |= {" ".join(words[start : start + SHINGLE_WORDS]) for start in starts}
    return found
