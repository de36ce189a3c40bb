"""The pages: links and anchors resolve, what fenced code names exists, pictures are what the script
draws.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

import pipeline
from pipeline.cli.app import app
from pipeline.config import Config
from pipeline.config.load import load_config
from pipeline.config.reference import reference

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
PAGES = sorted(TRACKED.stdout.split())
PROSE = [page for page in PAGES if not page.startswith("benchmarks/results")]
KEYS = re.findall(r"^\| `([^`]+)`", reference(), flags=re.MULTILINE)
COMMANDS = {command.callback.__name__ for command in app.registered_commands if command.callback}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_code(page: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text(page), flags=re.DOTALL)


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)
    return [body for language, body in found if language in languages]


def commands(page: str) -> list[str]:
    """The command lines of a page's fenced shell code, comments dropped and continued lines
    joined.
    """
    lines = "\n".join(blocks(page, "bash", "sh")).replace("\\\n", " ").splitlines()
    return [line for line in (line.partition("  #")[0].strip() for line in lines) if line]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_anchor_resolves(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}"


def test_every_page_is_in_the_site_s_navigation():
    navigation = text("mkdocs.yml").partition("\nnav:\n")[2].partition("\ntheme:\n")[0]
    for page in (ROOT / "docs").glob("*.md"):
        assert f"- {page.name}\n" in navigation, page.name


@pytest.mark.parametrize("page", PROSE)
def test_every_command_exists_and_every_file_that_it_runs(page):
    targets = re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE)
    for line in commands(page):
        words = line.split()
        if words[0] == "make":
            assert words[1] in targets, line
        if "medusa-distill" in words[0]:
            assert words[1] in COMMANDS, line
        for word in words:
            if re.fullmatch(r"(configs|flows|examples|scripts|tests|data)/[\w/.-]+", word):
                assert (ROOT / word).exists(), line
            if word.startswith("benchmarks."):
                assert (ROOT / "benchmarks" / f"{word.partition('.')[2]}.py").is_file(), line


@pytest.mark.parametrize("page", sorted(set(PROSE) - {"CHANGELOG.md"}))  # it names removed keys
def test_every_key_that_is_named_exists(page):
    prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
    key = re.compile(
        rf"(?<![\w./-])(?:{'|'.join(Config.model_fields)})(?:\.[a-z_0-9]+)+(?=$|[ =:,])"
    )
    for code in re.findall(r"`([^`\n]+)`", prose):
        for name in key.findall(code):
            is_file = Path(name).suffix in (".py", ".md", ".json", ".jsonl", ".yaml", ".html")
            assert is_file or any(f"{known}.".startswith(f"{name}.") for known in KEYS), name


@pytest.mark.parametrize("page", PROSE)
def test_every_override_in_a_command_is_valid(page, tmp_path):
    for line in commands(page):
        words = [word.strip("'\"") for word in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", line)]
        config = next(
            (word for word in words if word.startswith("configs/")), "configs/zephyr-7b.yaml"
        )
        overrides = [word for word in words if re.match(r"(?!PIP)[a-z]+\.[a-z_.]+=", word)]
        load_config(ROOT / config, [word.replace("$heads", "4") for word in overrides])


def test_explained_messages_are_those_of_the_code():
    sources = "\n".join(
        node.value
        for path in (ROOT / "pipeline").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = text("docs/faults-and-resume.md").partition("## What a message means")[2]
    rows = page.partition("## ")[0].splitlines()
    quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row.partition(" | ")[0])]
    fragments = [part.strip() for code in quoted for part in code.split("…") if part.strip()]
    assert len(fragments) >= 10
    assert [part for part in fragments if part not in sources] == []


@pytest.mark.parametrize("page", PROSE)
def test_blocks_are_configuration_or_import_public_names(page):
    for block in blocks(page, "yaml"):
        assert set(yaml.safe_load(block)) <= set(Config.model_fields), page
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "pipeline":
                assert {name.name for name in node.names} <= set(pipeline.__all__), page


def test_every_public_name_is_documented():
    page = text("docs/python.md")
    assert [name for name in pipeline.__all__ if f"`{name}" not in page] == []


def test_the_configuration_page_lists_every_key():
    page = text("docs/configuration.md").partition("<!-- keys -->")[2]
    keys = page.partition("<!-- /keys -->")[0].strip()
    assert keys == reference(), "run python scripts/write_keys.py"


def test_the_commands_page_lists_every_option():
    names = runpy.run_path(str(ROOT / "scripts" / "write_commands.py"))
    page = text("docs/commands.md").partition(names["BEGIN"])[2].partition(names["END"])[0]
    assert page == names["options"](), "run python scripts/write_commands.py"


def test_pictures_are_what_the_script_draws():
    names = runpy.run_path(str(ROOT / "scripts" / "draw_images.py"))
    for name, draw in names["PICTURES"].items():
        assert (names["IMAGES"] / name).read_text() == draw(), "run scripts/draw_images.py"


def test_every_room_is_described():
    page = text("docs/architecture.md")
    for path in (ROOT / "pipeline").iterdir():
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in page, path.name


def test_measured_claims_are_those_of_the_results():
    results = [
        json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")
    ]
    measured = {claim["measured"] for result in results for claim in result["claims"]}
    written = {f"{value:.{digits}f}" for value in measured for digits in (0, 1, 2)}
    page = text("docs/benchmarks.md")
    rows = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ")]
    figures = []
    for cell in rows:
        without_speeds = re.sub(r"\(.*?\)", "", cell)
        figures += re.findall(r"\d+(?:\.\d+)?", without_speeds)
    assert len(figures) >= 12 and [figure for figure in figures if figure not in written] == []


def test_the_readme_s_figures_are_those_that_the_script_writes():
    names = runpy.run_path(str(ROOT / "scripts" / "write_demo.py"))
    block = text("README.md").partition(names["BEGIN"])[2].partition(names["END"])[0]
    written = tuple(row.split("|")[1].strip() for row in block.splitlines()[2:])
    assert written == names["FIGURES"], "run python scripts/write_demo.py"
