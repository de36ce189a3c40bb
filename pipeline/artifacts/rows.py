"""From a shard's rows back to the words the rest of the project speaks: conversations and spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.spans import Span
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory


def seed_row(conversation: Conversation, split: str) -> dict[str, Any]:
    """A conversation as a row of the seeds stage."""
    return {
        "id": conversation.id,
        "source_id": conversation.source_id,
        "category": conversation.category,
        "split": split,
        "messages": message_dicts(conversation.messages),
    }


def conversation_of(row: dict[str, Any]) -> Conversation:
    """The conversation in a row of the seeds stage."""
    messages = tuple(Message(message["role"], message["content"]) for message in row["messages"])
    return Conversation(row["id"], messages, row["source_id"], row["category"])


def message_dicts(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [asdict(message) for message in messages]


def spans_of(row: dict[str, Any]) -> list[Span]:
    """The target-written spans in a row of generate or features."""
    return [Span(span["start"], span["end"], span["role"]) for span in row["spans"]]


def train_conversations(seeds: StageDirectory) -> Iterator[Conversation]:
    """The seeds that may be trained on."""
    for path in seeds.shards():
        yield from (conversation_of(row) for row in read_rows(path) if row["split"] == "train")
