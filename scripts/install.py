"""Install a lock file with pip and a progress bar: `python scripts/install.py LOCK [PIP_OPTIONS]`.

pip itself prints either several lines per package or, with --quiet, nothing for minutes. On a
terminal, this script prints one line with the number of packages that are fetched and the name of
the next, and then that they are unpacked. Elsewhere it prints a line for each quarter. If pip
fails, the end of its output is printed. Only Python is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TextIO

WIDTH = 30


def main(lock: str, *options: str) -> int:
    """Install the packages of a lock file; return pip's exit code."""
    total = sum(
        bool(re.match(r"[A-Za-z0-9]", line))
        for line in Path(lock).read_text(encoding="utf-8").splitlines()
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--progress-bar",
        "off",
        *options,
        "-r",
        lock,
    ]
    said: list[str] = []
    bar = Bar(total, sys.stderr)
    with subprocess.Popen(
        pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            said.append(line)
            if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.\-]+)", line):
                bar.step(found.group(1))
            elif line.startswith("Installing collected packages"):
                bar.show(f"unpacking {total} packages, which takes a minute or two")
    bar.close()
    if process.returncode:
        sys.stderr.writelines(said[-40:])
    return process.returncode


class Bar:
    """A progress bar in one line of a terminal: `[#####     ] 57/201 numpy`."""

    def __init__(self, total: int, stream: TextIO):
        self.total, self.stream, self.done, self.is_terminal = total, stream, 0, stream.isatty()

    def step(self, name: str) -> None:
        self.done += 1
        if self.is_terminal or self.done % max(1, self.total // 4) == 0:
            self.show(name)

    def show(self, text: str) -> None:
        filled = WIDTH * min(self.done, self.total) // max(1, self.total)
        line = f"[{'#' * filled}{' ' * (WIDTH - filled)}] {self.done}/{self.total} {text}"
        self.stream.write(f"\r\033[K{line}" if self.is_terminal else f"{line}\n")
        self.stream.flush()

    def close(self) -> None:
        if self.is_terminal:
            self.stream.write("\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
