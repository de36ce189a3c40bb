"""Safe printing of texts from data on a terminal."""

from __future__ import annotations

CONTROLS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


def visible(text: str) -> str:
    """The text with each control character replaced by its symbol, so that escape sequences have no effect."""
    return text.translate(CONTROLS)
