"""Several sources as one stream of rows: one after another, or mixed by weight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.readers import SourceReader

Row = Conversation | RejectedRow


def mixed(
    readers: Sequence[SourceReader], check: Callable[[Conversation], Row] = lambda row: row
) -> Iterator[Row]:
    """The rows of all sources, each conversation as `check` leaves it.

    Without weights the sources are read whole, one after another. With weights conversations are
    taken in proportion to them (d'Hondt's order: next is the source with the fewest kept ones for
    its weight), so that at every moment each share is right up to a few conversations, fewer than
    there are sources. It ends with the first source that has no more. Rejected rows are passed on
    and do not count.
    """
    weights = [reader.source.weight for reader in readers]
    streams = [_checked(reader, check) for reader in readers]
    if all(weight is None for weight in weights):
        yield from itertools.chain.from_iterable(streams)
        return
    kept = [0] * len(readers)
    while True:
        at = min(
            range(len(readers)),
            key=lambda index: ((kept[index] + 1) / (weights[index] or 1.0), index),
        )
        for row in streams[at]:
            yield row
            if isinstance(row, Conversation):
                kept[at] += 1
                break
        else:
            return


def _checked(reader: SourceReader, check: Callable[[Conversation], Row]) -> Iterator[Row]:
    return (check(row) if isinstance(row, Conversation) else row for row in reader)
