"""Draw the images of the README and the docs into docs/images: `python scripts/draw_images.py`.

    race.svg    five forward passes of plain decoding beside five with heads
    tree.svg    a tree of candidates and its mask
    house.svg   the packages of pipeline/ in layers, from tests/test_architecture.py
    samples.svg tokens per step by answers to each prompt, from benchmarks/results
    demo.svg    what `make demo` prints, line by line, from demo.txt
    report.svg  the top of its report.html, from demo-report.json

The first three are schematic: they show the mechanism, and no figure in them is measured. The last
two are of a demo that `scripts/record_demo.py` has recorded. Each image but demo.svg has a light
and a dark style. A test compares the output with the committed files.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from pipeline.artifacts.json_form import from_json
from pipeline.report.documents import render_html
from pipeline.report.report import Report

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SAMPLES = ROOT / "benchmarks" / "results" / "samples.csv"

STYLE = """
text { font: 14px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328; }
.token { font: 13px ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace; }
.title { font-weight: 600; }
.note { fill: #59636e; font-size: 13px; }
.page { fill: #ffffff; stroke: #d1d9e0; }
.own { fill: #ddf4ff; stroke: #54aeff; }
.free { fill: #dafbe1; stroke: #4ac26b; }
.idle { fill: #f6f8fa; stroke: #d1d9e0; }
.line { fill: none; stroke: #afb8c1; stroke-width: 1.5; }
.path { fill: none; stroke: #4ac26b; stroke-width: 3; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9198a1; }
.page { fill: #0d1117; stroke: #3d444d; }
.own { fill: #0c2d6b; stroke: #388bfd; }
.free { fill: #033a16; stroke: #2ea043; }
.idle { fill: #151b23; stroke: #3d444d; }
.line { stroke: #656c76; }
.path { stroke: #2ea043; }
}
"""

TERMINAL_STYLE = """
text { font: 13px ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace; fill: #e6edf3; }
.window { fill: #0d1117; }
.good { fill: #3fb950; }
.bold { font-weight: 600; }
.dim { fill: #9198a1; }
"""
FASTER = 10  # demo.svg: times as fast as recorded
ROWS, LINE_HEIGHT, TERMINAL_WIDTH = 30, 18, 860
PAGE_WIDTH, PAGE_HEIGHT = 1100, 760  # of report.svg

# The tokens that each forward of race.svg adds: first the target's own, then accepted guesses.
FORWARDS = (
    ("The", "old", "bridge", "was"),
    ("built", "in"),
    ("1874", "by", "the"),
    ("masons", "of", "the", "town"),
    (",", "stone", "by", "stone"),
)
GUESSED = {
    (0,): "old",
    (1,): "new",
    (2,): "town",
    (0, 0): "bridge",
    (0, 1): "mill",
    (1, 0): "bridge",
}
GUESSED |= {(0, 0, 0): "was", (0, 0, 1): "is", (0, 1, 0): "was", (0, 0, 0, 0): "opened"}
ACCEPTED = ((0,), (0, 0), (0, 0, 0))


def rectangle(x: float, y: float, width: float, height: float, kind: str, radius: float = 5) -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        f' rx="{radius:g}"/>'
    )


def label(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    return f'<path class="{kind}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


def picture(width: int, height: int, described: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' role="img">'
    )
    page = rectangle(0.5, 0.5, width - 1, height - 1, "page", 8)
    body = [
        head,
        f"<title>{escape(described)}</title>",
        f"<style>{STYLE}</style>",
        page,
        *parts,
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def tokens(x: float, y: float, forwards: Iterable[Iterable[str]]) -> Iterable[str]:
    """Draw forwards one after another, each as a row of tokens over a numbered bracket.

    The first token of each forward is the target's own.
    """
    for number, forward in enumerate(forwards, start=1):
        start = x
        for place, word in enumerate(forward):
            width = 8 * len(word) + 12
            yield rectangle(x, y, width, 26, "free" if place else "own")
            yield label(x + width / 2, y + 18, word, "token", "middle")
            x += width + 2
        yield f'<path class="line" d="M{start:g} {y + 31:g}v5H{x - 2:g}v-5"/>'
        yield label((start + x) / 2 - 1, y + 51, str(number), "note", "middle")
        x += 8


def race() -> str:
    words = [word for forward in FORWARDS for word in forward]
    count = len(FORWARDS)
    parts = [
        label(24, 36, f"Plain decoding: {count} forward passes, {count} tokens", "title"),
        *tokens(24, 50, [(word,) for word in words[:count]]),
        label(
            24,
            142,
            f"With heads: {count} forward passes, {len(words)} tokens of the same text",
            "title",
        ),
        *tokens(24, 156, FORWARDS),
        rectangle(24, 228, 14, 14, "own", 3),
        label(45, 240, "the target's own token: one in every forward", "note"),
        rectangle(365, 228, 14, 14, "free", 3),
        label(386, 240, "guessed by the heads, verified by the target in the same forward", "note"),
    ]
    return picture(
        840, 262, "Five forwards of plain decoding beside five forwards with Medusa heads", parts
    )


def place_of() -> dict[tuple[int, ...], tuple[float, float]]:
    """Return the centre (x, y) of each node of the tree.

    x grows with the depth, and each leaf has a line of its own.
    """
    places: dict[tuple[int, ...], tuple[float, float]] = {}
    row = 0

    def visit(path: tuple[int, ...]) -> float:
        nonlocal row
        children = sorted(
            child for child in GUESSED if child[:-1] == path and len(child) == len(path) + 1
        )
        if not children:
            y, row = 92 + 46.0 * row, row + 1
        else:
            y, *_ = [visit(child) for child in children]  # visits all, not only the first
        places[path] = (70 + 118.0 * len(path), y)
        return y

    visit(())
    return places


def tree() -> str:
    places, kept = place_of(), {(), *ACCEPTED}
    nodes = sorted(places)
    parts = [label(24, 36, "One forward verifies a tree of guesses", "title")]
    for depth in range(1, max(map(len, nodes)) + 1):
        parts.append(label(70 + 118 * depth, 64, f"head {depth - 1}", "note", "middle"))
    parts.append(label(70, 64, "root", "note", "middle"))
    for path in sorted((path for path in nodes if path), key=lambda path: path in kept):
        (x1, y1), (x2, y2) = places[path[:-1]], places[path]
        kind = "path" if path in kept else "line"
        parts.append(
            f'<path class="{kind}" d="M{x1 + 38:g} {y1:g}C{x1 + 62:g} {y1:g} {x2 - 62:g} {y2:g}'
            f' {x2 - 38:g} {y2:g}"/>'
        )
    for path in nodes:
        x, y = places[path]
        kind = "own" if not path else "free" if path in kept else "idle"
        parts += [
            rectangle(x - 38, y - 14, 76, 28, kind),
            label(x, y + 5, GUESSED.get(path, "The"), "token", "middle"),
        ]
    parts += mask(nodes, kept, 634, 78)
    notes = (
        (
            "A path is a tuple of ranks: (0, 1) is the second guess of head 1 after the best guess"
            " of head 0."
        ),
        (
            "The longest path that the target agrees with is kept (green); the target adds its own"
            " next token."
        ),
        "In the mask each row attends to its own path and to the text before the tree.",
    )
    parts += [label(24, 316 + 21 * row, note, "note") for row, note in enumerate(notes)]
    return picture(
        900, 378, "A tree of candidate tokens, the accepted path, and the tree mask", parts
    )


def mask(
    nodes: list[tuple[int, ...]], kept: set[tuple[int, ...]], x: float, y: float
) -> Iterable[str]:
    """Draw the tree mask, with a row per node.

    A cell is filled if the row's node attends to the column's node, which is itself or an ancestor.
    """
    cell = 18
    yield label(x, 36, "The mask of that forward", "title")
    for row, path in enumerate(nodes):
        for column, other in enumerate(nodes):
            kind = (
                "idle"
                if path[: len(other)] != other
                else "free"
                if path in kept and path
                else "own"
            )
            yield rectangle(x + cell * column, y + cell * row, cell - 2, cell - 2, kind, 2)
        yield label(
            x + cell * len(nodes) + 6,
            y + cell * row + 13,
            "  ".join(map(str, path)) or "root",
            "note",
        )


def floors() -> list[list[str]]:
    """Return FLOORS of tests/test_architecture.py: the packages of each layer, lowest first."""
    module = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    named = {node.targets[0].id: node.value for node in module.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    return [[room.value for room in floor.elts] for floor in named["FLOORS"].elts]


def house() -> str:
    rows = floors()
    height, width, gap = 34, 760, 6
    parts = [
        label(
            24, 36, "The rooms of pipeline/: a room imports only from floors below its own", "title"
        )
    ]
    for level, rooms in enumerate(reversed(rows)):
        y, room_width = 56 + level * (height + gap), (width - gap * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            x = 24 + place * (room_width + gap)
            parts += [
                rectangle(x, y, room_width, height, "own"),
                label(x + room_width / 2, y + 22, room, "token", "middle"),
            ]
    bottom = 56 + len(rows) * (height + gap)
    parts += [
        line(810, 62, 810, bottom - 18),
        f'<path class="line" d="M804 {bottom - 28}L810 {bottom - 18}L816 {bottom - 28}"/>',
    ]
    turned = f"translate(832 {28 + bottom / 2:g}) rotate(90)"
    parts.append(f'<text class="note" transform="{turned}" text-anchor="middle">imports</text>')
    return picture(860, bottom + 14, "The floors of the package: imports point down", parts)


def samples() -> str:
    """Draw a bar for each recipe of four passes: the rate of the tree, by prompts and answers."""
    parts = [label(24, 36, "Tokens per step, by prompts and answers to each", "title")]
    y = 56
    before = None
    with SAMPLES.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["passes"] == "4"]
    for row in rows:
        conversations, answers, rate = row["conversations"], row["answers_to_each"], row["tree_63"]
        batch = int(row["positions_per_step"])
        if conversations != before:
            y += 12
            parts.append(label(24, y + 19, f"{conversations} prompts"))
        before = conversations
        kind = "idle"
        if answers.startswith("four"):
            kind = "own"
        elif "greedy" in answers:
            kind = "free"
        parts += [
            rectangle(400, y, 80 * float(rate), 28, kind, 3),
            label(388, y + 19, f"{answers}; batches of {batch:,}", "note", "end"),
            label(408 + 80 * float(rate), y + 19, rate),
        ]
        y += 34
    return picture(
        800, y + 12, "Tokens per step from 60 and 250 prompts, by answers to each prompt", parts
    )


def demo() -> str:
    """Draw the demo's output as a terminal in which its lines appear, ten times as fast.

    Without animations, all lines are there, and the last of them are in view.
    """
    recorded = []
    for line_of_record in (IMAGES / "demo.txt").read_text(encoding="utf-8").splitlines():
        seconds, _, words = line_of_record.partition(" ")
        recorded.append((float(seconds) / FASTER, words))
    last = recorded[-1][0] + 1
    scrolls, texts = [], []
    for number, (seconds, words) in enumerate(recorded):
        hidden = max(0, number + 1 - ROWS)
        scrolls.append(
            f"{100 * seconds / last:.2f}% {{ transform: translateY({-LINE_HEIGHT * hidden}px) }}"
        )
        texts.append(
            f'<text class="{kind_of(words)}" x="16" y="{LINE_HEIGHT * (number + 1)}"'
            f' style="animation-delay:{seconds:.2f}s">{terminal_line(words)}</text>'
        )
    shift = -LINE_HEIGHT * max(0, len(recorded) - ROWS)
    height = 52 + LINE_HEIGHT * ROWS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {TERMINAL_WIDTH} {height}"'
            f' width="{TERMINAL_WIDTH}" role="img">',
            "<title>make demo: the stages from seeds to check, and the figures at the end</title>",
            f"<style>{TERMINAL_STYLE}",
            f".all {{ transform: translateY({shift}px); }}",
            "@media (prefers-reduced-motion: no-preference) {",
            "text { animation: appear 0.01s backwards; }",
            f".all {{ animation: scroll {last:.2f}s step-end backwards; }}",
            "@keyframes appear { from { opacity: 0 } }",
            f"@keyframes scroll {{ {' '.join(scrolls)} }}",
            "}</style>",
            f'<rect class="window" width="{TERMINAL_WIDTH}" height="{height}" rx="8"/>',
            f'<svg y="38" width="{TERMINAL_WIDTH}" height="{height - 44}"'
            f' viewBox="0 5 {TERMINAL_WIDTH} {height - 44}">',
            f'<g class="all">{"".join(texts)}</g>',
            "</svg>",
            '<text class="bold" x="16" y="24">$ make demo</text>',
            f'<text class="dim" x="{TERMINAL_WIDTH - 16}" y="24" text-anchor="end">'
            f"{FASTER} times as fast</text>",
            "</svg>",
            "",
        ]
    )


def terminal_line(words: str) -> str:
    """Return a line's text in SVG, which would join its spaces, with a green check mark."""
    text = escape(words).replace(" ", "\N{NO-BREAK SPACE}")
    return text.replace("✓", '<tspan class="good">✓</tspan>')


def kind_of(words: str) -> str:
    """Return the style of a line of the demo's output."""
    if words.startswith("Check passed"):
        return "good"
    if words == "demo":
        return "bold"
    return "dim" if words.startswith(("─", "  ")) else ""


def report() -> str:
    """Draw the top of the demo's report.html, at a fixed width."""
    figures = json.loads((IMAGES / "demo-report.json").read_text(encoding="utf-8"))
    page = render_html(from_json(Report, figures), [])
    style = page.split("<style>")[1].split("</style>")[0]
    body = page.split("<body>")[1].split("</body>")[0]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' viewBox="0 0 {PAGE_WIDTH} {PAGE_HEIGHT}" width="{PAGE_WIDTH}" role="img">\n'
        "<title>The report of make demo</title>\n"
        f'<foreignObject width="{PAGE_WIDTH}" height="{PAGE_HEIGHT}">'
        f'<body xmlns="http://www.w3.org/1999/xhtml"><style>{style}</style>{body}</body>'
        "</foreignObject>\n</svg>\n"
    )


PICTURES = {
    "race.svg": race,
    "tree.svg": tree,
    "house.svg": house,
    "samples.svg": samples,
    "demo.svg": demo,
    "report.svg": report,
}


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
