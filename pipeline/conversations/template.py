"""Chat templates over token ids: the ids before, between and after the sampled texts.

These ids are tokenized from parts of the rendered template; sampled ids are never tokenized again.
Some templates render earlier turns differently once another turn follows, for example without their
thoughts. Then `rewrites_history` returns True, and the conversation continues in a new row.

A special token in a message's text, such as `</s>` in a user's question, would end a turn or write
another role's header. So each one is replaced by a mark before rendering. After rendering, the text
of the special token takes the place of the mark, tokenized in two parts so that no id is special.
The template's own special tokens stay special.

Limits: the end of a turn must be a single token, since engines stop at tokens. Only tokens that the
tokenizer declares special are escaped, not other added tokens such as Qwen's `<think>`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from pipeline.conversations.conversation import Message, Reason, Role, RowRejected
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The template's text is tokenized after one of these, so that the tokenizer does not treat it as
# the start of a text and add a space.
ANCHORS = ("a", ".", "\n")
CONTEXT_CHARACTERS = 64  # at the prompt's end, used instead of an anchor; longer than any token
MARK = "\ufdd1"  # a noncharacter, which Unicode reserves for internal use
MARKED = re.compile(f"{MARK}(\\d+){MARK}")
PROBE_CALL = '[{"name": "placeholder_function", "arguments": {"place": "PlaceholderArgument"}}]'
PROBE_WORDS = ("placeholder_function", "PlaceholderArgument", "PlaceholderResult")


class ChatTemplate:
    """A target's chat template, which gives the token ids around sampled texts.

    Args:
        tokenizer: The target's tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template.
        today: The date for templates that ask for it (`strftime_now`); by default the day of the
            call.
        arguments: Further variables of the template, such as Qwen3's `enable_thinking`.

    Attributes:
        end_ids: For the roles "assistant" and "user", a tuple with the id of the token that ends a
            text. The tuple is empty if no token does, for example if only plain text follows a
            user's message (Vicuna, Llama-2).

    Raises:
        ConfigError: There is no template, or it cannot render a conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        today: date | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._template = chat_template
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise self._error("The target's tokenizer has no chat template.")
        self._escapes = True
        self._tools = "null"
        self._variables = dict(arguments or {})
        if today is not None:
            self._variables["strftime_now"] = today.strftime
        added = tokenizer.added_tokens_decoder
        self._marks = {id for id, token in added.items() if token.content.strip()}
        self._special_ids = {id for id, token in added.items() if token.special}
        self._special_ids.discard(tokenizer.unk_token_id)
        texts = [token.content for token in added.values() if token.special]
        self._special_texts = sorted(filter(str.strip, texts), key=lambda text: (-len(text), text))
        self._special = re.compile("|".join(map(re.escape, self._special_texts)) or r"(?!)")
        hello = Message("user", "Hello")
        try:
            answer_end = self._first_end_token(self._text_after([hello], "assistant", hello))
            user_end = self._first_end_token(self._text_after([], "user"))
        except RowRejected as error:
            what = "The chat template cannot render a conversation of two questions: "
            raise self._error(f"{what}{error.detail}") from error
        self.end_ids: dict[Role, tuple[int, ...]] = {"assistant": answer_end, "user": user_end}

    def _error(self, what: str) -> ConfigError:
        """Return a ConfigError about the target's chat template."""
        where = str(self._tokenizer.name_or_path)
        return ConfigError(what, where, "Give one in target.chat_template.")

    def variant(self, *, tools: str | None = None, escapes: bool = True) -> ChatTemplate:
        """Return a copy of the chat template with other settings.

        Args:
            tools: The functions that the assistant may call (`Conversation.tools`), if any.
            escapes: Whether special tokens in messages become plain text; otherwise they stay
                control tokens.
        """
        other = copy.copy(self)
        other._tools = tools or "null"
        other._escapes = escapes
        return other

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Whether the chat template renders function calls and their results."""
        asked = [
            Message("user", "Hello"),
            Message("assistant", "", PROBE_CALL),
            Message("tool", "PlaceholderResult"),
        ]
        try:
            text = self.render(asked, asks=True)
        except RowRejected:
            return False
        return all(word in text for word in PROBE_WORDS)

    def special_tokens_in(self, messages: Sequence[Message]) -> list[str]:
        """Return the special tokens in the text of messages, each once, in order of appearance."""
        text = "\n".join(message.text for message in messages)
        return list(dict.fromkeys(self._special.findall(text)))

    def render(self, messages: Sequence[Message], *, asks: bool) -> str:
        """Render messages as text; special tokens in the messages become marks if they are escaped.

        With `asks`, the rendered text ends where the next answer begins.

        Raises:
            RowRejected: The template raised, for example because it takes no system prompt.
        """
        try:
            return self._tokenizer.apply_chat_template(
                for_template(messages, self._marked),
                chat_template=self._template,
                add_generation_prompt=asks,
                tokenize=False,
                tools=marked_values(json.loads(self._tools), self._marked),
                **self._variables,
            )
        except Exception as error:  # a template is a program, and may raise anything
            detail = str(error) or type(error).__name__
            raise RowRejected(Reason.TEMPLATE_REFUSED, detail) from error

    def _marked(self, text: str) -> str:
        """Replace each special token in a message's text by a mark, if special tokens are escaped.

        A `MARK` that the text contains becomes U+FFFD.
        """
        if not self._escapes:
            return text
        index = self._special_texts.index
        text = text.replace(MARK, "\ufffd")
        return self._special.sub(lambda match: f"{MARK}{index(match[0])}{MARK}", text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids into text, without special tokens and surrounding white space."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.strip()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the prompt for an answer to these messages.

        The prompt begins with BOS only if the template writes it.

        Raises:
            RowRejected: The template raised, or a special token cannot be written as text.
        """
        return self._tokenize(self.render(messages, asks=True))

    def separator(
        self, messages: Sequence[Message], writer: Role, ended: bool, *asked: Message
    ) -> list[int]:
        """Return the chat template's token ids between a sampled text and the next answer.

        Args:
            messages: The history before the sampled text.
            writer: The role of the sampled text.
            ended: Whether the sampled ids include the token that ends the text; otherwise the
                separator begins with it.
            asked: The messages between the sampled text and the next answer: the user's message,
                and function calls with their results. Empty after a sampled user message.

        Raises:
            RowRejected: A message cannot be rendered or tokenized.
        """
        return self._without_end(self._text_after(messages, writer, *asked), writer, ended)

    def role_header(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the chat template's token ids between an answer and a sampled user message.

        Args:
            messages: The history before the answer.
            ended: Whether the sampled ids of the answer include the token that ends it; otherwise
                the header begins with it.

        Raises:
            RowRejected: A message cannot be rendered or tokenized.
        """
        next_user = _unused_word(messages)
        text = self._text_after(messages, "assistant", Message("user", next_user))
        # A space before a text belongs to the text's first token, as after the generation prompt
        # "ASSISTANT:".
        header = text.partition(next_user)[0].rstrip(" ")
        return self._without_end(header, "assistant", ended)

    def _without_end(self, text: str, writer: Role, ended: bool) -> list[int]:
        """Tokenize the text that the template writes after a sampled text.

        If the sampled ids include the end token (`ended`), only the ids after it are returned.
        """
        ids = self._tokenize_after(text)
        for index, id in enumerate(ids):
            if ended and id in self.end_ids[writer]:
                return ids[index + 1 :]
        return ids

    def recite(self, messages: Sequence[Message], answer: str) -> list[int]:
        """Return the token ids of a seed's answer and its end token, as if the target wrote them.

        Args:
            messages: The history before the answer.

        Raises:
            RowRejected: A message cannot be rendered or tokenized.
        """
        before = self.render(messages, asks=True)
        whole = self.render([*messages, Message("assistant", answer)], asks=False)
        tail = self._text_after(messages, "assistant", asks=False)
        # The answer as the template renders it, or unchanged if the template rewrites the history.
        text = self._marked(answer) + tail
        if whole.startswith(before) and whole.endswith(tail):
            text = whole.removeprefix(before)
        before = MARKED.sub(lambda match: self._special_texts[int(match[1])], before)
        context = before[-CONTEXT_CHARACTERS:]
        end = self._first_end_token(tail)
        if not end:  # this template ends a turn only when another one follows
            ids = self._tokenize_after(text.removesuffix(tail), context)
            return [*ids, *self.end_ids["assistant"]]
        ids = self._tokenize_after(text, context)
        while ids[-1] not in end:
            ids.pop()
        return ids

    def rewrites_history(self, history: Sequence[Message], asked: Sequence[Message]) -> bool:
        """Return whether the chat template renders `history` differently when `asked` follows.

        If so, the next prompt does not begin with the tokens of the conversation so far. `history`
        must end with an answer.

        Raises:
            RowRejected: The template raised.
        """
        *before_answer, answer = history
        before = self.render(before_answer, asks=True)
        after = self.render([*history, *asked], asks=True)
        if not after.startswith(before):
            return True
        return not after[len(before) :].lstrip().startswith(self._marked(answer.content.strip()))

    def _text_after(
        self, messages: Sequence[Message], role: Role, *asked: Message, asks: bool = True
    ) -> str:
        """Return the text that the chat template writes after a message of this role.

        Args:
            messages: The history before the message.
            asked: Messages after it, which are part of the returned text.
            asks: Whether the text ends where the next answer begins.

        Raises:
            RowRejected: The template raised, or leaves out the message.
        """
        word = _unused_word([*messages, *asked])
        rendered = self.render([*messages, Message(role, word), *asked], asks=asks)
        if word not in rendered:
            raise RowRejected(Reason.TEMPLATE_REFUSED, "The template leaves out a message.")
        return rendered.rpartition(word)[2]

    def _first_end_token(self, text: str) -> tuple[int, ...]:
        """Return the end-of-turn token with which a text begins, as a tuple of one id.

        The tuple is empty if the text begins with anything else. White space before the token is
        ignored, and any added token of the tokenizer counts.
        """
        for id in self._tokenize_after(text):
            if id in self._marks:
                return (id,)
            if self.decode([id]):
                break
        return ()

    def _tokenize(self, text: str) -> list[int]:
        """Tokenize a rendered text; marks become the plain text of their special tokens.

        Raises:
            RowRejected: A special token cannot be written as plain text.
        """
        first, *rest = MARKED.split(text)
        # verbose=False: a text longer than the context is rejected later, with a reason
        ids = list(self._tokenizer(first, add_special_tokens=False, verbose=False)["input_ids"])
        for index, after in zip(rest[::2], rest[1::2], strict=True):
            ids += self._tokenize_as_text(self._special_texts[int(index)])
            if after:
                ids += self._tokenize_after(after)
        return ids

    def _tokenize_as_text(self, special: str) -> list[int]:
        """Tokenize the text of a special token as plain text, split in two parts.

        Raises:
            RowRejected: Each split yields a special token.
        """
        for at in range(1, len(special)):
            ids = self._tokenize_after(special[:at]) + self._tokenize_after(special[at:])
            if not self._special_ids.intersection(ids):
                return ids
        raise RowRejected(
            Reason.SPECIAL_TOKENS,
            f"The special token {special!r} cannot be written as text.",
        )

    def _tokenize_after(self, text: str, context: str = ANCHORS[0]) -> list[int]:
        """Tokenize a text as the continuation of `context`.

        This avoids the space that some tokenizers put at the start of a text. If a token spans the
        end of `context` and the start of the text, `ANCHORS` are tried instead, one after another.
        If that fails too, the text is tokenized alone.
        """
        for anchor in (context, *ANCHORS):
            before, whole = self._tokenize(anchor), self._tokenize(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._tokenize(text)


def _unused_word(messages: Sequence[Message]) -> str:
    """Return a placeholder word that the text of no message contains."""
    word = "Placeholder"
    while any(word in message.text for message in messages):
        word += "X"
    return word


def for_template(
    messages: Sequence[Message], marked: Callable[[str], str]
) -> list[dict[str, object]]:
    """Convert messages to the dicts that chat templates take.

    A function call and its result share an id of nine characters, as Mistral's template requires.

    Args:
        marked: Applied to every text; replaces special tokens by marks.
    """
    given: list[dict[str, object]] = []
    open_calls: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        fields: dict[str, object] = {"role": message.role, "content": marked(message.content)}
        if message.tool_calls is not None:
            open_calls = []
            calls = []
            for call in marked_values(json.loads(message.tool_calls), marked):
                id = f"call{number:05d}"
                number += 1
                open_calls.append((id, call["name"]))
                calls.append({"type": "function", "id": id, "function": call})
            fields["tool_calls"] = calls
        elif message.role == "tool":
            id, name = open_calls.pop(0) if open_calls else ("call00000", "")
            fields["tool_call_id"] = id
            fields["name"] = name
        given.append(fields)
    return given


def marked_values(value: Any, marked: Callable[[str], str]) -> Any:
    """Return a JSON value with `marked` applied to every string, including the keys."""
    if isinstance(value, str):
        return marked(value)
    if isinstance(value, dict):
        return {marked(key): marked_values(item, marked) for key, item in value.items()}
    if isinstance(value, list):
        return [marked_values(item, marked) for item in value]
    return value
