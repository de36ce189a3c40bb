"""Fair draws of held-out rows: one per conversation, each source and category in its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.artifacts.check_result import PromptSource
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.fair_draw import fair_order, id_hash
from pipeline.conversations.spans import Span

Stratum = tuple[str, str | None]  # source and category
NO_CATEGORIES: Mapping[str, str] = {}


@dataclass(frozen=True)
class DrawnRows:
    """Held-out rows of different conversations, in the order of `fair_order`.

    Attributes:
        rows: The rows.
        skipped: The number of held-out conversations in which no prompt leaves room.
        sources: What each source and category has, and how much of it was drawn.
    """

    rows: list[TokenRow]
    skipped: int
    sources: list[PromptSource]


def draw_rows(
    rows: Iterable[TokenRow],
    number: int,
    room: int,
    split: str,
    categories: Mapping[str, str] = NO_CATEGORIES,
) -> DrawnRows:
    """Draw up to `number` rows of a split fairly, at most one per conversation.

    The share of each source, and of each category in it, is its share of the conversations in
    `rows`. A conversation may have a row per turn; a hash chooses among those that fit.

    Args:
        rows: Rows of the generate stage, of all splits.
        room: The longest prompt in tokens. A row fits if it has an answer to such a prompt.
        categories: The category of each conversation that has one, by its id.
    """
    sizes: Counter[Stratum] = Counter()
    conversations: set[str] = set()
    held_out: set[str] = set()
    fitting: dict[str, Stratum] = {}
    kept: dict[str, TokenRow] = {}
    for row in rows:
        name = row.parent_id
        stratum = (name.rpartition(":")[0], categories.get(name))
        if name not in conversations:
            conversations.add(name)
            sizes[stratum] += 1
        if row.split != split:
            continue
        held_out.add(name)
        if fitting_answers(row, room):
            fitting[name] = stratum
            if name not in kept or id_hash(row.id) < id_hash(kept[name].id):
                # A copy of the ids, since a view would keep those of a whole row group in memory.
                kept[name] = replace(row, input_ids=row.input_ids.copy())
    chosen = fair_order(fitting, sizes)[:number]
    num_fitting = Counter(fitting.values())
    num_drawn = Counter(fitting[name] for name in chosen)
    sources = []
    for stratum in sorted(sizes, key=str):
        source, category = stratum
        sources.append(
            PromptSource(
                source=source,
                category=category,
                conversations=sizes[stratum],
                held_out=num_fitting[stratum],
                prompts=num_drawn[stratum],
            )
        )
    drawn = [kept[name] for name in chosen]
    return DrawnRows(drawn, len(held_out) - len(fitting), sources)


def fitting_answers(row: TokenRow, room: int) -> list[Span]:
    """Return the assistant's spans in a row whose prompts have at most `room` tokens."""
    return [span for span in row.spans if span.role == "assistant" and span.start <= room]
