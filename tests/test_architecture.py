"""The house: imports point down, and the heavy engines are imported in one place each."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"errors", "redact", "formatting"},
    {"config"},
    {"conversations"},
    {"storage"},
    {"heads", "targets"},
    {"decoding"},
    {"artifacts", "execution"},
    {"report"},
    {"export"},
    {"training"},
    {"evaluation"},
    {"run"},
    {"stages"},
    {"flow"},
    {"api"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IN = {"ray": ("execution/", "training/ray_entry.py"), "vllm": ("targets/vllm_",)}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def modules() -> list[tuple[str, Path]]:
    files = [file for file in (ROOT / "pipeline").rglob("*.py") if file.name != "__init__.py"]
    return [
        (file.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py"), file) for file in files
    ]


def test_imports_point_to_lower_levels_only():
    for room, file in modules():
        assert room in LEVEL, room
        rooms = {name.split(".")[1] for name in imports(file) if name.startswith("pipeline.")}
        upward = {
            other for other in rooms & LEVEL.keys() if other != room and LEVEL[other] >= LEVEL[room]
        }
        assert not upward, f"{file} imports {upward}"


def test_stages_never_import_each_other():
    for room, file in modules():
        assert room != "stages" or not any(
            name.startswith("pipeline.stages") for name in imports(file)
        ), file


def test_heavy_engines_are_imported_in_one_place():
    for _, file in modules():
        inside = str(file.relative_to(ROOT / "pipeline"))
        for package, places in ONLY_IN.items():
            assert package not in {
                name.split(".")[0] for name in imports(file)
            } or inside.startswith(places), inside


def test_no_file_imports_itself_through_others():
    """Lazy and type-only imports count."""
    graph = {}
    for _, file in modules():
        graph[".".join(file.relative_to(ROOT).with_suffix("").parts)] = imports(file)
    for name in graph:
        reached, todo = set(), [name]
        while todo:
            new = graph[todo.pop()] & graph.keys() - reached
            reached |= new
            todo += new
        assert name not in reached, name


def test_no_two_files_have_the_same_name():
    names = Counter(file.name for _, file in modules())
    assert {name for name, times in names.items() if times > 1} <= {"push.py", "check.py"}, (
        "a command and its stage"
    )


def test_a_flow_is_a_story_of_at_most_sixty_lines():
    for flow in (ROOT / "flows").glob("*.py"):
        assert len(flow.read_text().splitlines()) <= 60, flow
