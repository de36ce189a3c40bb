"""Where a finished run is tampered with, and how commands are given to what is left: see `benchmarks.tampering`.

Commands run in processes forked from a server that has imported the pipeline.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import operator
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.endings import Ended, digest, tree_of
from benchmarks.outlets import Published, figures_of_check
from tests.export.hub_stand_in import HubStandIn, take_for_the_hub
from tests.flows.tiny import merged, save_seeds, save_target

IMPORTS = [
    *("pipeline.cli.app", "pipeline.flow", "pipeline.cli.chat_model", "pipeline.report.html"),
    *("pipeline.evaluation.any_heads", "pipeline.archive.storing", "pipeline.archive.restoring"),
    *("transformers.models.llama.modeling_llama", "matplotlib.backends.backend_svg"),
    *("tests.flows.tiny", "tests.export.hub_stand_in", "benchmarks.ground", "benchmarks.warm"),
]
PATIENCE = 60  # seconds until a command counts as hung
MEMORY = 16 * 1024**3  # bytes of address space of one command
STAGES = ("seeds", "generate", "features", "tuned-features", "train", "calibrate", "check")
SUMMARIES = tuple(f"inspect {stage}" for stage in STAGES)
MOST_ASKED = ("plan", "status", "verify", "chat", "push", "compare", "check")  # each reads more than one stage
READERS = (*MOST_ASKED, *SUMMARIES, "keys")
PUSHED = ["--repo-id", "me/heads", "--base-model", "owner/target"]
BRIEFLY = ["--engine", "native", "--number", "2", "--max-new-tokens", "6", "--repeats", "1"]
SETTINGS: dict[str, Any] = {
    "generate": {"engine": "transformers", "max_new_tokens": 16, "rounds": 2},
    "train": {"heads": "medusa", "num_heads": 3, "epochs": 1, "batch_tokens": 256, "warmup_steps": 1, "lr": 1e-2},
    "calibrate": {"nodes": 8},
    "check": {
        "prompts": 8,
        "max_new_tokens": 6,
        "engines": ["native"],
        "repeats": 1,
        "baselines": [],
        "require_learning": False,
    },
    "limits": {"min_free_disk_gb": 0},
}
BACKBONE = {"sequence_length": 96, "batch_sequences": 4, "lora_rank": 4, "lr": 0.01, "max_kl": 50.0}
RUNS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "sequential": {"train__heads": "recurrent", "train__method": "medusa-2", "train__backbone": BACKBONE},
}

MADE_IN = {"medusa": "elsewhere", "sequential": "runs"}  # one is moved; a tuned backbone's path is in its export


@dataclass(frozen=True)
class Reference:
    """An untampered run.

    Attributes:
        path, archive: Its directory, and an archive of it.
        said: What commands say of it.
        counted: The sha256 of the files that count, by path.
        checked: What `check` has measured of its export.
        published: What a push of it leaves on the Hub.
    """

    path: Path
    archive: Path
    said: dict[str, Ended]
    counted: dict[str, str]
    checked: dict[str, Any]
    published: Published


class Ground:
    """Where cases take place: `case/` is made anew for each, the target, the seeds and the Hub are shared."""

    def __init__(self, place: Path, hub: HubStandIn):
        self.place, self.case, self.hub = place, place / "case", hub
        self.name = ""  # of the run whose copy is in `case/`
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(IMPORTS)
        (place / "shared").mkdir()
        self.target = save_target(place / "shared" / "target")
        self.seeds = save_seeds(place / "shared" / "seeds.jsonl")

    @property
    def run(self) -> Path:
        return self.case / "runs" / "run"

    @property
    def outside(self) -> Path:
        return self.case / "outside"

    @property
    def archive(self) -> Path:
        return self.case / "tmp" / "archive"

    @property
    def restored(self) -> Path:
        return self.case / "tmp" / "restored"

    def reference(self, name: str) -> Reference:
        """A finished run, put aside, and what each command says of it."""
        root = MADE_IN[name]
        self.prepare(name, root=root)
        self._whole("run", drawn=True, patience=600)
        path = shutil.copytree(self.case / root / "run", self.place / name, symlinks=True)
        self.prepare(name, path)
        said = {reader: self.command(reader) for reader in READERS}
        checked = figures_of_check(self.case / "tmp" / "checked")
        self._whole("archive")
        archive = shutil.copytree(self.archive, self.place / f"{name}-archive")
        self._whole("publish")
        stages = [link.resolve() for link in (path / "latest").iterdir()]
        records = [(stage, json.loads((stage / "DONE.json").read_text())) for stage in stages]
        counted = {str((stage / file).relative_to(path)) for stage, done in records for file in done["files"]}
        sums = {file: digest(path / file) for file in sorted(counted)}
        return Reference(path, archive, said, sums, checked, self.published())

    def _whole(self, name: str, **how: Any) -> None:
        """Give a command to an untampered run."""
        ended = self.command(name, **how)
        if ended.code != 0:
            raise RuntimeError(f"'{name}' of a whole run ended with {ended.code}: {ended.stderr}")

    def published(self) -> Published:
        """What anybody sees on the Hub: files by name, by repository."""
        return {name: dict(made.files) for name, made in self.hub.repositories.items() if made.files}

    def prepare(self, name: str, run: Path | None = None, root: str = "runs") -> None:
        """An empty ground, or one with a copy of a run; beside it is what nobody may touch."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.hub.repositories.clear()
        self.hub.lfs.clear()
        self.name = name
        (self.case / "tmp").mkdir(parents=True)
        (self.outside / "shards").mkdir(parents=True)
        for sentinel in ("precious.txt", "heads.safetensors", "x.0123456789ab.tmp", "shards/00000.parquet"):
            (self.outside / sentinel).write_text("somebody's")
        (self.case / "prompt.txt").write_text("why red cat?\n")
        more = {"target": {"model": str(self.target)}, "run": {"name": "run", "root": str(self.case / root)}}
        more["seeds"] = {"sources": [{"path": str(self.seeds)}], "rows_per_shard": 10}
        (self.case / "config.yaml").write_text(yaml.safe_dump(merged(SETTINGS | more, RUNS[name])))
        if run:
            shutil.copytree(run, self.run, symlinks=True)

    def command(self, name: str, *, drawn: bool = False, patience: float = PATIENCE) -> Ended:
        """Give a command to the run, and wait so many seconds for its end; `run-own` uses the run's own run.yaml."""
        config, run, own = str(self.case / "config.yaml"), str(self.run), str(self.run / "run.yaml")
        tuned, restored = self.place / "sequential" / "latest" / "export" / "backbone", str(self.restored)
        model = str(tuned if self.name == "sequential" else self.target)
        checked = ["--prompts", str(self.seeds), "--out", f"{self.case}/tmp/checked"]
        name, _, stage = name.partition(" ")
        line = {
            "run": ["run", config, "--executor", "inline"],
            "run-own": ["run", own, "--executor", "inline"],
            "plan": ["plan", config],
            "status": ["status", run],
            "verify": ["verify", run],
            "inspect": ["inspect", run, stage],
            "chat": ["chat", f"{run}/latest/export", "--max-new-tokens", "6"],
            "push": ["push", run, *PUSHED, "--dry-run"],
            "publish": ["push", run, *PUSHED],
            "compare": ["compare", run, str(self.place / self.name)],
            "check": ["check", f"{run}/latest/export", "--target", model, *BRIEFLY, *checked],
            "archive": ["archive", run, str(self.archive)],
            "restore": ["restore", str(self.archive), restored],
            "verify-restored": ["verify", restored],
            "keys": ["keys"],
        }[name]
        began = time.monotonic()
        process = self.processes.Process(
            target=_obey, args=(line, str(self.case), self.hub.endpoint, drawn), daemon=True
        )
        process.start()
        process.join(patience)
        if hung := process.exitcode is None:
            process.kill()
            process.join()
        said = [(self.case / "tmp" / stream).read_text(errors="replace") for stream in ("out", "err")]
        return Ended(line, None if hung else process.exitcode, *said, time.monotonic() - began)

    def untouchable(self) -> dict[str, tuple[Any, ...]]:
        """Everything but the run and the folder for temporary files."""
        others = (place for place in self.place.iterdir() if place != self.case)
        found = tree_of(self.case, but=(self.run, self.case / "tmp"))
        return functools.reduce(operator.or_, (tree_of(place) for place in others), found)


def _obey(line: list[str], case: str, hub: str, drawn: bool) -> None:
    """What `medusa-distill LINE` does, in a process of its own."""
    from pipeline.cli.app import app
    from pipeline.cli.ending import ends_well
    from pipeline.report import html

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(case)
    os.environ |= {"TMPDIR": f"{case}/tmp", "HOME": f"{case}/tmp", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
    tempfile.tempdir = None
    for number, name, mode in (
        (0, f"{case}/prompt.txt", "r"),
        (1, f"{case}/tmp/out", "w"),
        (2, f"{case}/tmp/err", "w"),
    ):
        with open(name, mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "rww"[number]) for number in range(3))
    take_for_the_hub(pytest.MonkeyPatch(), hub, Path(case, "tmp"))
    if not drawn:
        html.drawings = lambda *_: {}  # type: ignore[assignment]
    code = ends_well(lambda: app(line, standalone_mode=False))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
