"""A scripted target, which answers a fixed seed conversation with given texts."""

from __future__ import annotations

from dataclasses import replace

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.requests import Completion, Finish, Request, Sampling
from pipeline.conversations.row_builder import GeneratedRow
from pipeline.conversations.template import ChatTemplate

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
END = "<|im_end|>"


def seed_dialogue(template: ChatTemplate, **changes) -> Dialogue:
    """The seed's dialogue, with these changes of the settings."""
    return Dialogue(SEED, template, replace(SETTINGS, **changes))


def ids_of(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def hold(dialogue: Dialogue, tokenizer, *texts: str) -> list[Request]:
    """Answer with the texts, with ChatML's end of turn; one that ends with '…' is cut there."""
    requests = []
    for text in texts:
        request = dialogue.next_request()
        if request is None:
            break
        requests.append(request)
        cut = text.endswith("…")
        ids = ids_of(text.removesuffix("…") if cut else text + END, tokenizer)
        finish: Finish = "length" if cut or len(ids) > request.max_new_tokens else "stop"
        dialogue.receive(Completion(request.id, ids[: request.max_new_tokens], finish))
    return requests


def only_row(dialogue: Dialogue) -> GeneratedRow:
    assert dialogue.next_request() is None
    (row,) = dialogue.rows()
    return row


def answers(row: GeneratedRow) -> list[str]:
    return [message.content for message in row.messages if message.role == "assistant"]


def written(row: GeneratedRow, tokenizer) -> list[str]:
    """The text of each span."""
    return [tokenizer.decode(row.input_ids[span.start : span.end]) for span in row.spans]
