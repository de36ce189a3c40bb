"""Chat templates over token ids: the ids before, between and after the sampled texts.

These ids are tokenized from parts of the rendered template; sampled ids are never tokenized again.
Some templates render earlier turns differently once another turn follows, for example without their
thoughts, and some texts end with another token than the template's. Then `continuation` returns
None, and the conversation continues in a new row.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from pipeline.conversations.conversation import (
    Message,
    Reason,
    Role,
    RowRejected,
    SpecialTokens,
)
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The template's text is tokenized after one of these, so that the tokenizer does not treat it as
# the start of a text and add a space.
ANCHORS = ("a", ".", "\n")
CONTEXT_CHARACTERS = 64  # at the prompt's end, used instead of an anchor; longer than any token
MARK = "\ufdd1"  # a noncharacter, which Unicode reserves for internal use
MARKED = re.compile(f"{MARK}(\\d+){MARK}")
RARE_TEXT = "\U0010ffff"  # that a vocabulary without bytes writes as its unknown token
PROBE_CALL = '[{"name": "placeholder_function", "arguments": {"place": "PlaceholderArgument"}}]'
WORD = "Placeholder5c0e2d7f91b64a38"  # for a message; no text is likely to contain it
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
            last_end = self._first_end_token(self._text_after([hello], "assistant", asks=False))
            user_end = self._first_end_token(self._text_after([], "user"))
            header = self._answer_header(hello)
        except RowRejected as error:
            raise self._error(
                f"The chat template cannot render a conversation of two questions: {error.detail}"
            ) from error
        self.end_ids: dict[Role, tuple[int, ...]] = {"assistant": answer_end, "user": user_end}
        self._answer_ends = {*answer_end, *last_end}
        self._header_ids = header

    def _error(self, what: str) -> ConfigError:
        """Return a ConfigError about the target's chat template."""
        return ConfigError(
            what,
            self._tokenizer.name_or_path,
            "Give one in target.chat_template.",
        )

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

    def token_from(self, least: int, special_tokens: SpecialTokens = "escape") -> str | None:
        """Return the first token with an id from `least` on that a prompt can hold, with the id.

        A message's text can hold any token but the escaped special ones; those count if the chat
        template writes them, and the unknown token if the tokenizer needs it. Return None if there
        is no such token.
        """
        vocabulary = self._tokenizer.get_vocab()
        beyond = sorted((id, token) for token, id in vocabulary.items() if id >= least)
        written = {*self._answer_ends, *self._tokenizer.encode(RARE_TEXT, add_special_tokens=False)}
        hello = Message("user", "Hello")
        called = [Message("assistant", "", PROBE_CALL), Message("tool", "PlaceholderResult")]
        for system in ([], [Message("system", "Hello")]):
            for answer in ([Message("assistant", "Hello"), hello], called):
                try:
                    written.update(self.opening([*system, hello, *answer]))
                except RowRejected:
                    continue  # this template takes no system message, or no function calls
        for id, token in beyond:
            if id in written or special_tokens == "keep" or token not in self._special_texts:
                return f"{token} ({id})"
        return None

    def tokens(self, ids: Iterable[int]) -> str:
        """Return the texts of tokens, with commas."""
        return ", ".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

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

    def opening(self, messages: Sequence[Message], writer: Role = "assistant") -> list[int]:
        """Return the token ids of the prompt for a text of this role after these messages.

        The prompt begins with BOS only if the template writes it.

        Raises:
            RowRejected: The template raised, or a special token cannot be written as text.
        """
        return self._tokenize(self._prompt(messages, writer))

    def stop_ids(self, writer: Role, stated: Iterable[int]) -> tuple[int, ...]:
        """Return the sorted ids of the tokens that end a text of this role.

        These are the `stated` EOS ids and the template's own end. For an answer the template's end
        is left out if the stated ids include the end of a last answer: in the harmony format of
        gpt-oss, `<|end|>` ends earlier answers, and also each thought before an answer.
        """
        ends = set(stated)
        if writer != "assistant" or not self._answer_ends.intersection(ends):
            ends.update(self.end_ids[writer])
        return tuple(sorted(ends))

    def content(self, ids: Sequence[int]) -> str:
        """Return the text that a server would send for a sampled answer, without its end token.

        If the template writes special tokens before an answer (harmony's final channel), the text
        is what follows them; it is empty if the answer has no such tokens.
        """
        header = self._header_ids
        for start in reversed(range(len(ids) if header else 0)):
            if list(ids[start : start + len(header)]) == header:
                return self.decode(ids[start + len(header) :])
        return "" if header else self.decode(ids)

    def continuation(
        self, history: Sequence[Message], asked: Sequence[Message], writer: Role, end: int | None
    ) -> list[int] | None:
        """Return the template's token ids between the last sampled text and the next one.

        Return None if the next prompt does not begin with the tokens so far: the template renders
        `history` differently when `asked` follows, or ends the text with another token than `end`.

        Args:
            history: The messages so far, of which the last one was sampled.
            asked: The messages before the next text: the user's message, and function calls with
                their results.
            writer: The role of the next text.
            end: The token that ended the sampled text. None if it was cut: the ids then begin with
                the template's end.

        Raises:
            RowRejected: A message cannot be rendered or tokenized.
        """
        *earlier, text = history
        before = self._prompt(earlier, text.role)
        after = self._prompt([*history, *asked], writer)
        content = self._marked(text.content.strip())
        rest = after[len(before) :].lstrip()
        if not after.startswith(before) or not rest.startswith(content):
            return None
        if text.role == "assistant" and self._header_ids:
            return None  # the text was sampled with other channels, or without one
        rest = rest.removeprefix(content)
        ids = self._tokenize_after(rest)
        if end is None:
            return ids
        if self._first_end_token(rest) != (end,):
            return None
        return ids[ids.index(end) + 1 :]

    def _prompt(self, messages: Sequence[Message], writer: Role) -> str:
        """Render messages up to where the next text, of this role, begins.

        Raises:
            RowRejected: The template raised.
        """
        if writer == "assistant":
            return self.render(messages, asks=True)
        text = self.render([*messages, Message(writer, WORD)], asks=True)
        # A space before a text belongs to the text's first token, as after the generation prompt
        # "ASSISTANT:".
        return text.partition(WORD)[0].rstrip(" ")

    def recite(self, messages: Sequence[Message], answer: str) -> list[int]:
        """Return the token ids of a seed's answer and its end token, as if the target wrote them.

        Text that the generation prompt has already (`<think>`) is left out of the answer.

        Args:
            messages: The history before the answer.

        Raises:
            RowRejected: A message cannot be rendered or tokenized.
        """
        before = self.render(messages, asks=True)
        whole = self.render([*messages, Message("assistant", answer)], asks=False)
        tail = self._text_after(messages, "assistant", asks=False)
        # The answer as the template renders it, or unchanged if the template rewrites the history.
        text = self._marked(self._without_prefill(messages, before, answer)) + tail
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

    def _without_prefill(self, messages: Sequence[Message], before: str, answer: str) -> str:
        """Return a seed's answer without the text that the generation prompt prefills.

        Args:
            messages: The history before the answer.
            before: The rendered history, which ends with the generation prompt.
        """
        later = self.render([*messages, Message("assistant", WORD), Message("user", "")], asks=True)
        header = later.partition(WORD)[0].rstrip()
        prefill = before.removeprefix(header).strip()
        rest = answer.lstrip()
        if not before.startswith(header) or not prefill or not rest.startswith(prefill):
            return answer
        rest = rest.removeprefix(prefill)
        for white_space in before[len(before.rstrip()) :]:
            rest = rest.removeprefix(white_space)
        return rest

    def _answer_header(self, hello: Message) -> list[int]:
        """Return the token ids that a later prompt holds between a prompt and its answer's text.

        The list is empty if there is no special token among them.
        """
        before = self._prompt([hello], "assistant")
        after = self._prompt([hello, Message("assistant", WORD), hello], "assistant")
        ids = self._tokenize_after(after.removeprefix(before).partition(WORD)[0])
        has_header = after.startswith(before) and self._special_ids.intersection(ids)
        return ids if has_header else []

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
        rendered = self.render([*messages, Message(role, WORD), *asked], asks=asks)
        if WORD not in rendered:
            raise RowRejected(Reason.TEMPLATE_REFUSED, "The template leaves out a message.")
        return rendered.rpartition(WORD)[2]

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
