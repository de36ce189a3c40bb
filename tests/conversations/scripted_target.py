"""A conversation to be held, and a target that says what it is told to."""

from __future__ import annotations

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.requests import Completion, Request, Sampling
from pipeline.conversations.row_builder import GeneratedRow

SEED = Conversation(
    "seeds:7",
    (
        Message("system", "Be brief."),
        Message("user", "Hello?"),
        Message("assistant", "Seed one."),
        Message("user", "And you?"),
        Message("assistant", "Seed two."),
        Message("user", "Bye!"),
    ),
)
SETTINGS = DialogueSettings("replay", Sampling(max_new_tokens=200), max_tokens=1000)
LOOP = "la la " * 40


def ids_of(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def hold(dialogue: Dialogue, tokenizer, *texts: str) -> list[Request]:
    """Let the target say the texts, with ChatML's end of turn; one that ends with '…' runs into its
    limit there.
    """
    requests = []
    for text in texts:
        request = dialogue.next_request()
        if request is None:
            break
        requests.append(request)
        ids = ids_of(
            text.removesuffix("…") if text.endswith("…") else text + "<|im_end|>", tokenizer
        )
        cut = text.endswith("…") or len(ids) > request.max_new_tokens
        dialogue.receive(
            Completion(request.id, ids[: request.max_new_tokens], "length" if cut else "stop")
        )
    return requests


def only_row(dialogue: Dialogue) -> GeneratedRow:
    assert dialogue.next_request() is None
    (row,) = dialogue.rows()
    return row


def answers(row: GeneratedRow) -> list[str]:
    return [message.content for message in row.messages if message.role == "assistant"]


def written(row: GeneratedRow, tokenizer) -> list[str]:
    """What the spans say."""
    return [tokenizer.decode(row.input_ids[span.start : span.end]) for span in row.spans]
