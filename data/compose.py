"""Compose the bundled seed conversations from topics; the output is always the same.

    python data/compose.py        # writes seeds.sharegpt.jsonl and seeds.ultrachat.jsonl

A topic (topics/*.yaml) has `subjects`, `words`, and exchanges: each an `opening`, one of `more` or
a `closing`. A conversation picks one subject, one word of each kind, an opening and one to four
further exchanges. `sums` are computed. The words of words.yaml belong to every topic of their
language.

A question contains the words that its answer repeats, and no combination occurs twice: no two
conversations open with the same question, and no two answers of a topic begin alike. So an answer
that fits a held-out question is in no other row.

In a text, `{slot}` stands for a value of the subject or a word, and `{slot^}` capitalizes it. Lists
are written as numbered lines `{slot#}`, as bullets `{slot*}`, within a sentence `{slot,}` or
`{slot、}`, or as one entry `{slot1}`.
"""

from __future__ import annotations

import json
import operator
import random
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SLOT = re.compile(r"\{([a-z_]+)([\^#*,、]|\d?)\}")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_FOLLOW_UPS = (1, 1, 2, 2, 2, 3, 3, 4)
SYSTEM_SHARE, CLOSING_SHARE = 0.4, 0.35


def in_sentence(items: list[str], comma: str) -> str:
    """Join items for a sentence: "a, b and c", or all with the Chinese enumeration comma."""
    if comma == "、":
        return "、".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def render(value: Any, form: str) -> str:
    """Format the value of a slot; `form` is the character after the slot's name, if any."""
    match form:
        case "":
            return str(value)
        case "^":
            return value[:1].upper() + value[1:]
        case "#":
            return "\n".join(f"{number}. {item}" for number, item in enumerate(value, 1))
        case "*":
            return "\n".join(f"- {item}" for item in value)
        case "," | "、":
            return in_sentence(value, form)
        case _:
            return str(value[int(form) - 1])


def fill(text: str, slots: dict[str, Any]) -> str:
    """Replace every slot of a text; raise KeyError for a slot without a value."""
    return SLOT.sub(lambda match: render(slots[match[1]], match[2]), text)


def choose_slots(
    topic: dict[str, Any], subject: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Choose a conversation's slots: a word of each kind, the sums, and the subject's values."""
    slots = {kind: rng.choice(words) for kind, words in topic["words"].items()}
    for name, (left, operation, right) in topic.get("sums", {}).items():
        slots[name] = OPERATIONS[operation](
            *(slots[side] if isinstance(side, str) else side for side in (left, right))
        )
    for name, value in subject.items():
        slots[name] = fill(value, slots) if isinstance(value, str) else value
    return slots


def compose_one(
    topic: dict[str, Any], subject: dict[str, Any], rng: random.Random
) -> tuple[str | None, list[str]]:
    """Compose one conversation: a system prompt or None, and alternating questions and answers."""
    slots = choose_slots(topic, subject, rng)
    exchanges = [
        rng.choice(topic["opening"]),
        *rng.sample(topic["more"], rng.choice(NUM_FOLLOW_UPS)),
    ]
    if rng.random() < CLOSING_SHARE and len(exchanges) < 5:
        exchanges.append(rng.choice(topic["closing"]))
    turns = [
        fill(text, slots) for each in exchanges for text in (rng.choice(each["ask"]), each["say"])
    ]
    return (rng.choice(topic["system"]) if rng.random() < SYSTEM_SHARE else None), turns


def beginning(answer: str) -> str:
    """Return the first 20 words of an answer, up to 120 characters.

    Of an answer without spaces, such as a Chinese one, return the first 24 characters.
    """
    if " " not in answer:
        return answer[:24]
    return " ".join(answer.split()[:20])[:120]


def compose_topic(
    name: str, topic: dict[str, Any]
) -> Iterator[tuple[str, str, str | None, list[str]]]:
    """Yield every conversation of a topic as (id, category, system prompt, turns).

    The subjects take turns. A conversation that opens like an earlier one, or has an answer that
    begins like an earlier one, is drawn again.
    """
    rng = random.Random(name)
    number = 0
    used: set[str] = set()
    while number < topic["conversations"]:
        subject = topic["subjects"][number % len(topic["subjects"])]
        system, turns = compose_one(topic, subject, rng)
        beginnings = {turns[0], *map(beginning, turns[1::2])}
        if used.isdisjoint(beginnings):
            yield f"{name}-{number:03d}", topic["category"], system, turns
            used |= beginnings
            number += 1


def as_sharegpt(
    identifier: str, category: str, system: str | None, turns: list[str]
) -> dict[str, Any]:
    """Return a conversation as a row in ShareGPT form."""
    messages = [{"from": "system", "value": system}] if system else []
    messages += [
        {"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(turns)
    ]
    return {"id": identifier, "category": category, "conversations": messages}


def as_ultrachat(
    identifier: str, category: str, system: str | None, turns: list[str]
) -> dict[str, Any]:
    """Return a conversation as a row in UltraChat form, without the system prompt."""
    return {"id": identifier, "category": category, "data": turns}


def take_turns(topics: list[list[Any]]) -> list[Any]:
    """Interleave the topics' conversations, so that a file's first rows cover all topics."""
    return [row for each in zip_longest(*topics) for row in each if row is not None]


def read_yaml(path: Path) -> Any:
    """Read the content of a YAML file."""
    return yaml.CSafeLoader(path.read_text("utf-8")).get_single_data()


def read_topics() -> dict[str, dict[str, Any]]:
    """Read every topic, by its file's name, with the words of its language."""
    words = read_yaml(HERE / "words.yaml")
    topics = {}
    for file in sorted((HERE / "topics").glob("*.yaml")):
        topic = read_yaml(file)
        topic["words"] = words[topic["language"]] | topic.get("words", {})
        topics[file.stem] = topic
    return topics


def compose() -> dict[str, str]:
    """Return the content of both files by name.

    The first half of each topic is in ShareGPT form, the second half in UltraChat form.
    """
    rows = [list(compose_topic(name, topic)) for name, topic in read_topics().items()]
    files = {
        "seeds.sharegpt.jsonl": [
            as_sharegpt(*row) for row in take_turns([each[: len(each) // 2] for each in rows])
        ],
        "seeds.ultrachat.jsonl": [
            as_ultrachat(*row) for row in take_turns([each[len(each) // 2 :] for each in rows])
        ],
    }
    return {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        for name, content in files.items()
    }


if __name__ == "__main__":
    for file_name, content in compose().items():
        (HERE / file_name).write_text(content, "utf-8")
