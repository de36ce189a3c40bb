"""MkDocs hook: pages of the site from files outside docs/, and links between them.

The pages in docs/ link to files of the repository, such as ../configs/llama-3.yaml, so that they
read well where the repository is browsed. For the site, every file that is linked becomes a page:
Markdown as it is, a folder as the list of its files, a notebook as its cells, other text as code.
Binary files are copied. README.md is the home page. The page of the Python API is generated from
the docstrings of the names in docs/python.md.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", flags=re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")
BINARY = (".arrow", ".parquet")
LANGUAGES = {".cff": "yaml", ".jsonl": "json", ".sh": "bash"}
PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
API_PAGE = "api-reference.md"
API_INTRODUCTION = """# API reference

Every name that `pipeline` offers, from its docstring. [Python](python.md) shows them at work, and
[Configuration](configuration.md) has the sections and keys of a `Config`.
"""

sources: dict[str, str] = {}
"""The file or folder in the repository of each page, by the page's path in the site's sources."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and the files that pages link to."""
    sources.clear()
    for file in files.documentation_pages():
        sources[file.src_uri] = f"docs/{file.src_uri}"
    to_read = ["README.md", *sources.values()]
    while to_read:
        path = to_read.pop()
        uri = site_uri(path)
        if uri == path and not path.endswith(".md"):
            files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
            continue
        text = markdown_of(path)
        if uri not in files.src_uris:
            sources[uri] = path
            files.append(generated(config, uri, text))
        for target in links(text, path):
            is_new = site_uri(target) not in files.src_uris
            if is_new and (ROOT / target).exists():  # else MkDocs names the dead link
                to_read.append(target)
    files.append(generated(config, API_PAGE, api_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's relative links from paths in the repository to paths in the site."""
    path = sources.get(page.file.src_uri)
    if path is None:
        return markdown
    folder = os.path.dirname(page.file.src_uri) or "."

    def moved(link: re.Match[str]) -> str:
        return os.path.relpath(site_uri(repository_path(link[1], path)), folder)

    parts = CODE.split(markdown)
    for number, part in enumerate(parts):
        if number % 2 == 0:
            parts[number] = LINK.sub(moved, part).replace(" ± ", PLUS_MINUS)
        else:
            # In a table GitHub wants the bar escaped also in code; Python-Markdown does not.
            parts[number] = part.replace("\\|", "|")
    return "".join(parts)


def generated(config: MkDocsConfig, uri: str, text: str) -> File:
    """Create a page that need not be in the navigation."""
    return File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def links(text: str, path: str) -> list[str]:
    """Return the paths in the repository to which a page links."""
    prose = "".join(CODE.split(text)[::2])
    return [repository_path(link, path) for link in LINK.findall(prose)]


def repository_path(link: str, path: str) -> str:
    """Return the path in the repository of a relative link in the file or folder `path`."""
    folder = ROOT / path
    if not folder.is_dir():
        folder = folder.parent
    return os.path.relpath(folder / link, ROOT)


def site_uri(path: str) -> str:
    """Return where a file or folder of the repository lies in the site's sources."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    if path.endswith((".md", *BINARY)):
        return path
    return f"{path}.md"


def markdown_of(path: str) -> str:
    """Return a file or folder of the repository as the Markdown text of a page."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.name[0] not in "._")
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
    if file.suffix == ".ipynb":
        return notebook(json.loads(file.read_text(encoding="utf-8")))
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = LANGUAGES.get(file.suffix, file.suffix.removeprefix("."))
    # Not in the search index: its words would hide the pages that explain them.
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def notebook(content: dict) -> str:
    """Return the cells of a notebook as Markdown, without their output."""
    cells = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            text = f"```python\n{text}\n```"
        cells.append(text)
    return "\n\n".join(cells)


def api_reference() -> str:
    """Return the page on which mkdocstrings documents the names of docs/python.md, in its order."""
    table = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE)
    directives = [f"::: pipeline.{name}\n" for name in names]
    return "\n".join([API_INTRODUCTION, *directives])
