"""Reading what the commands print."""

from __future__ import annotations

from tests.flows.tiny import STAGES


def states(out: str) -> dict[str, str]:
    """The second column of the first table by the first."""
    found: dict[str, str] = {}
    for words in map(str.split, out.splitlines()):
        if len(words) > 1 and words[0] in [*STAGES, "push"]:
            found.setdefault(words[0], words[1])
    return found


def line_of(stage: str, out: str) -> str:
    """The table's line that begins with `stage`."""
    return next(line for line in out.splitlines() if line.split()[:1] == [stage])


def one_paragraph(text: str) -> str:
    """Return the message of an error; assert that it is the only line."""
    assert text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text
    return text.removeprefix("error: ").strip()
