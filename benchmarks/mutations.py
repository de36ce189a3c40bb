"""Ways to tamper with one file or folder of a finished run, by kind: bytes, types, names, times, links.

Each takes the path, a folder outside of the run that a link may lead to, and a random generator. What a mutation did is
returned as a few words for the record.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Tamper = Callable[[Path, Path, random.Random], str]
EVIL = "\x1b[2J\x1b]0;owned\x07[/x][red]"  # what a terminal obeys, and markup that rich would refuse
ODD_NAMES = (EVIL.replace("/", "|"), "\udcff\udcfe", "[/bold]".replace("/", "\\"), " ", "~", "-rf", "ü" * 100)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**64, 10**400, 1e308, math.nan, math.inf),
    *("", " \t", "\0", "\ud800", "é" * 300, "x" * 5000, EVIL, "NaN", "7"),
    *([], {}, [[]], [None], {"": ""}, {"sha256": 1}, [0, "x"]),
)
ELSEWHERE = ("../../../outside/precious.txt", "/", "..", ".", "a/../../../../outside", "~/x", "x\0y")
TEXTS: tuple[bytes, ...] = (
    *(b"", b"null", b"[]", b"{}", b"7", b'"x"', b"NaN", b"true", b"[" * 100_000, b'{"a":' * 50_000),
    *(b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}", b"{'a': 1}", b"9" * 5000, b"- x: [", b"!!python/object:os.system x"),
)


@dataclass(frozen=True)
class Mutation:
    """One way: its kind, its name, and whether it fits a path."""

    kind: str
    name: str
    tamper: Tamper
    fits: Callable[[Path], bool]


def is_record(path: Path) -> bool:
    return path.suffix in (".json", ".jsonl", ".yaml") and is_file(path)


def is_done(path: Path) -> bool:
    return path.name == "DONE.json" and is_file(path)


def is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def anything(path: Path) -> bool:
    return True


def flip(path: Path, outside: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes() or b"\0")
    place = rng.choice((0, len(data) - 1, rng.randrange(len(data)), rng.randrange(len(data))))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"at {place} of {len(data)}"


def flip_unnoticed(path: Path, outside: Path, rng: random.Random) -> str:
    """As a bad disk does: the modification time stays."""
    stat = path.stat()
    said = flip(path, outside, rng)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return said


def truncate(path: Path, outside: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    os.truncate(path, kept := rng.randrange(size) if size else 0)
    return f"to {kept} of {size}"


def extend(path: Path, outside: Path, rng: random.Random) -> str:
    more = rng.choice((b"\0", b"\n", b" ", b"x" * 1000, b"\xff", path.read_bytes()))
    with path.open("ab") as file:
        file.write(more)
    return f"by {len(more)}"


def empty(path: Path, outside: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return ""


def scramble(path: Path, outside: Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(path.stat().st_size))
    return ""


def retype(path: Path, outside: Path, rng: random.Random) -> str:
    """One value of a record becomes another, or goes."""
    return _edit(path, rng, signed=False)


def retype_signed(path: Path, outside: Path, rng: random.Random) -> str:
    """The same in a DONE.json, whose own sum is computed anew."""
    return _edit(path, rng, signed=True)


def _edit(path: Path, rng: random.Random, *, signed: bool) -> str:
    is_yaml, lines = path.suffix == ".yaml", path.read_text().splitlines()
    number = rng.randrange(max(1, len(lines))) if path.suffix == ".jsonl" else None
    text = "\n".join(lines) if number is None else (lines or ["{}"])[number]
    document = yaml.safe_load(text) if is_yaml else json.loads(text)
    place, document = changed(document, rng, STRANGE if is_yaml else STRANGE + ELSEWHERE)
    if signed and isinstance(document, dict):
        said = {key: value for key, value in document.items() if key != "sha256"}
        document = said | {"sha256": hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()}
    written = yaml.safe_dump(document) if is_yaml else json.dumps(document)
    if number is not None:
        lines[number : number + 1] = [written]
        written = "\n".join(lines) + "\n"
    path.write_text(written, errors="surrogatepass")
    return place


def changed(value: Any, rng: random.Random, strange: tuple[Any, ...], at: str = "") -> tuple[str, Any]:
    """A copy of a document with one place in it changed, and which place that is."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        new = copy.deepcopy(rng.choice(strange))
        return f"{at or 'all'} = {new!r:.40}", new
    value = copy.copy(value)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    where = f"{at}.{key}".lstrip(".")
    if rng.random() < 0.15:
        value.pop(key)
        return f"{where} gone", value
    if isinstance(value, dict) and rng.random() < 0.1:
        value[rng.choice(("unheard_of", "", EVIL, *ELSEWHERE))] = value.pop(key)
        return f"{where} renamed", value
    said, value[key] = changed(value[key], rng, strange, where)
    return said, value


def retext(path: Path, outside: Path, rng: random.Random) -> str:
    text = rng.choice(TEXTS)
    path.write_bytes(text)
    return repr(text[:20])


def misencode(path: Path, outside: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    place = rng.randrange(len(data) + 1)
    path.write_bytes(data[:place] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\\ud800")) + data[place:])
    return f"at {place}"


def rename(path: Path, outside: Path, rng: random.Random) -> str:
    odd = rng.choice((*ODD_NAMES, path.stem, f"{path.name}.tmp", f"{path.name}.bak", f".{path.name}"))
    path.rename(path.with_name(odd))
    return repr(odd)


def recase(path: Path, outside: Path, rng: random.Random) -> str:
    path.rename(path.with_name(path.name.upper() if path.name != path.name.upper() else path.name.lower()))
    return ""


def remove(path: Path, outside: Path, rng: random.Random) -> str:
    shutil.rmtree(path) if is_folder(path) else path.unlink()
    return ""


def add_beside(path: Path, outside: Path, rng: random.Random) -> str:
    """A foreign file or folder with an odd name, or a copy under a name of the kind that is read."""
    name = f"{rng.choice((*ODD_NAMES, '00099', 'step-abc'))}{path.suffix}"
    new = path.with_name(name)
    if is_file(path) and rng.random() < 0.7:
        shutil.copy2(path, new)
    elif rng.random() < 0.5:
        new.write_bytes(rng.randbytes(10))
    else:
        new.mkdir()
    return repr(name)


def swap(path: Path, outside: Path, rng: random.Random) -> str:
    """Two neighbours of one kind change places."""
    others = [other for other in sorted(path.parent.iterdir()) if other.suffix == path.suffix and other != path]
    if not others:
        return remove(path, outside, rng)
    other, aside = rng.choice(others), path.with_name("aside")
    path.rename(aside), other.rename(path), aside.rename(other)
    return other.name


def retime(path: Path, outside: Path, rng: random.Random) -> str:
    seconds = rng.choice((0, 1, -(10**9), 2**31, 4_000_000_000, 1_500_000_000))
    os.utime(path, (seconds, seconds), follow_symlinks=False)
    return str(seconds)


def link(path: Path, outside: Path, rng: random.Random) -> str:
    """A symbolic link to an equal copy outside, absolute or relative; the copy's name is returned."""
    copied = outside / f"linked-{path.name}"
    shutil.move(path, copied)
    path.symlink_to(copied if rng.random() < 0.5 else os.path.relpath(copied, path.parent))
    return copied.name


def hard_link(path: Path, outside: Path, rng: random.Random) -> str:
    os.link(path, outside / f"hard-{path.name}")
    return ""


def dangle(path: Path, outside: Path, rng: random.Random) -> str:
    remove(path, outside, rng)
    path.symlink_to(rng.choice((str(outside / "nothing"), path.name, "/nonexistent/x", EVIL)))
    return ""


def redirect(path: Path, outside: Path, rng: random.Random) -> str:
    """A link to something else: a folder or a file outside, the root, its own parent."""
    remove(path, outside, rng)
    goal = rng.choice((outside, outside / "precious.txt", outside / "shards", Path("/"), path.parent))
    path.symlink_to(goal)
    return goal.name


def make_folder(path: Path, outside: Path, rng: random.Random) -> str:
    remove(path, outside, rng)
    path.mkdir()
    if rng.random() < 0.5:
        (path / "inside").write_text("x")
    return ""


def make_file(path: Path, outside: Path, rng: random.Random) -> str:
    remove(path, outside, rng)
    path.write_text("a file")
    return ""


def make_pipe(path: Path, outside: Path, rng: random.Random) -> str:
    remove(path, outside, rng)
    os.mkfifo(path)
    return ""


MUTATIONS = (
    *(
        Mutation("bytes", way.__name__, way, is_file)
        for way in (flip, flip_unnoticed, truncate, extend, empty, scramble)
    ),
    *(Mutation("types", way.__name__, way, is_record) for way in (retype, retype, retype, retext, misencode)),
    Mutation("types", "retype_signed", retype_signed, is_done),
    *(Mutation("names", way.__name__, way, anything) for way in (rename, recase, remove, add_beside, swap)),
    Mutation("times", "retime", retime, anything),
    *(Mutation("links", way.__name__, way, anything) for way in (link, dangle, redirect, make_pipe)),
    *(Mutation("links", way.__name__, way, is_file) for way in (hard_link, make_folder)),
    Mutation("links", "make_file", make_file, is_folder),
)
