"""The field's English in docstrings and in names of tests."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("pipeline", "benchmarks", "tests")
NOT_FIRST = {"As", "How", "In", "It", "Of", "That", "These", "Those", "What", "Whatever", "Where"}
NOT_FIRST |= {"Which", "Whoever", "Why", "With", "Within"}
MOST_WORDS = 10  # of a test's name
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            first = (ast.get_docstring(node) or "The").split()[0].strip(",.:")
            if first in NOT_FIRST:
                found.append(f"{getattr(node, 'name', 'module')}: its docstring begins: {first}")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if node.name.count("_") > MOST_WORDS:
                found.append(f"{node.name}: more than {MOST_WORDS} words")
    return found


def test_docstrings_and_names_of_tests_are_plain():
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT)
            found += [f"{where}: {offence}" for offence in offences(path.read_text())]
    assert not found, "\n".join(found)


def test_offences_are_found():
    long = "test_" + "_".join("abcdefghijk")
    source = f'"""In words."""\ndef {long}():\n    """What: it is."""\n'
    assert [line.partition(":")[0] for line in offences(source)] == ["module", long, long]
