"""The text of a message, as dumps write it: a string, or parts of one."""

from __future__ import annotations

from typing import Any

from pipeline.conversations.conversation import Reason, RowRejected, utf8_text


def clean_text(text: Any) -> str:
    """A turn's text without byte order marks, NULs and surrounding white space.

    Raises:
        RowRejected: It is not a string, or it is undecodable.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.NOT_TEXT, f"A turn's text is a {type(text).__name__}.")
    # Leading white space of the first line is kept: it may be the indentation of code.
    return utf8_text(text, "a turn").replace("\0", "").lstrip("\ufeff\r\n").rstrip()


def joined_parts(content: Any) -> Any:
    """A content given in parts, joined to one text."""
    if not isinstance(content, list):
        return content
    texts = [_text_of_part(part) for part in content]
    for part, text in zip(content, texts, strict=True):
        if text is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowRejected(
                Reason.NOT_TEXT, f"A turn has a part that is not text: {str(kind)[:40]}."
            )
    return "".join(text for text in texts if text is not None)


def _text_of_part(part: Any) -> str | None:
    """The text of a part: itself, under `text`, under `value`, or under both, as OpenAI's
    assistants write it.
    """
    found = (
        next((part[key] for key in ("text", "value") if part.get(key)), "")
        if isinstance(part, dict)
        else part
    )
    found = found.get("value") if isinstance(found, dict) else found
    known = not isinstance(part, dict) or "text" in part or "value" in part
    return found if known and isinstance(found, str) else None
