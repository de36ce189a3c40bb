"""The items of a JSON array that is larger than memory, as texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

MARKS = re.compile(rb'[\[\]{},"]')  # what shapes an array, outside of a string
IN_STRING = re.compile(
    rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL
)  # up to its end, the chunk's, or a last backslash


class BrokenOff(Exception):
    """An array's brackets do not close, or something follows them."""


def array_items(chunks: Iterator[bytes], most_bytes: int) -> Iterator[bytes | None]:
    """The text of each item of a JSON array, None for one of more than `most_bytes`.

    Only brackets, commas and the ends of strings are read. A parser that reads values as well takes
    quadratic time for a string over many chunks, and no id above 64 bits.

    Raises:
        BrokenOff: A bracket is missing, or there is one too many.
    """
    depth, in_string, at = 0, False, 0  # `at`: from where in the chunk the next mark is looked for
    item = _Item(most_bytes)
    for chunk in chunks:
        begin = 0  # where the part of the chunk begins that belongs to the item
        while at < len(chunk):
            if in_string:
                at = _end(chunk, at)
                in_string = at >= len(chunk)
                at += not in_string
                continue
            if (mark := MARKS.search(chunk, at)) is None:
                break
            at, found = mark.end(), mark[0]
            in_string = found == b'"'
            if found in (b"[", b"{"):
                depth += 1
                begin = at if depth == 1 else begin
            elif found in (b"]", b"}"):
                depth -= 1
            if depth == 0 or (depth == 1 and found == b","):
                item.add(chunk[begin : mark.start()])
                if found == b"," or not item.is_blank:
                    yield item.text
                item, begin = _Item(most_bytes), at
            if depth == 0:
                if chunk[at:].strip() or any(rest.strip() for rest in chunks):
                    raise BrokenOff("something follows its last bracket")
                return
        item.add(chunk[begin:])
        at = max(0, at - len(chunk)) if in_string else 0
    raise BrokenOff("its last bracket is missing")


def _end(chunk: bytes, at: int) -> int:
    """Where the string ends that goes on at `at`; beyond the chunk where its last backslash escapes
    what follows.
    """
    end = at + len(rest[0]) if (rest := IN_STRING.match(chunk, at)) else at
    return end + 2 if chunk[end : end + 1] == b"\\" else end


class _Item:
    """The text of an item, put together from chunks and dropped where it grows too long."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._text: bytearray | None = bytearray()

    def add(self, part: bytes) -> None:
        if self._text is not None:
            self._text += part
            if len(self._text) > self._most_bytes:
                self._text = None

    @property
    def is_blank(self) -> bool:
        return self._text is not None and not self._text.strip()

    @property
    def text(self) -> bytes | None:
        return None if self._text is None else bytes(self._text)
