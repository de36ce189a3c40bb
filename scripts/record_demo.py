"""Record `make demo` for the README's pictures: `python scripts/record_demo.py`.

It runs the demo and, if this succeeds, writes two files beside the pictures, without the path of
this checkout:

    demo.txt          what the demo prints: on each line the seconds since its start, and a line
    demo-report.json  its report.json

Then `python scripts/draw_images.py` draws them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
COLUMNS = "100"


def main() -> int:
    lines = []
    command = ["make", "--silent", "demo"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout
        started = time.monotonic()
        for line in demo.stdout:
            print(line, end="")
            seconds = time.monotonic() - started
            lines.append(f"{seconds:.1f} {without_root(line)}")
    if demo.returncode:
        return demo.returncode
    report = (ROOT / "runs" / "demo" / "report.json").read_text(encoding="utf-8")
    (IMAGES / "demo.txt").write_text("".join(lines), encoding="utf-8")
    (IMAGES / "demo-report.json").write_text(without_root(report), encoding="utf-8")
    return 0


def without_root(text: str) -> str:
    """Make paths in this checkout relative to it."""
    return text.replace(f"{ROOT}/", "")


if __name__ == "__main__":
    sys.exit(main())
