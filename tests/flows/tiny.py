"""A target, seeds and a finished run so small that the whole flow takes seconds: what the flow's
tests share.

The target is a random Llama with a real tokenizer and chat template. Its weights are wide enough
that its greedy choices are no ties, and it has several end-of-sequence ids, so that some of its
answers end by themselves.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pipeline.artifacts.generated_rows import TokenRow, read_token_rows
from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory

if TYPE_CHECKING:
    from pipeline.run.context import Context
    from pipeline.run.resolved import ResolvedRun

STAGES = ["seeds", "generate", "features", "train", "calibrate", "export", "check"]
SHARDED = ("seeds", "generate", "features")
NUM_SEEDS, ROWS_PER_SHARD = 40, 10
CONTEXT = 192
NEW_TOKENS = 6  # of an answer to a question of the check
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
WORDS = [
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "moon",
    "river",
    "stone",
    "why",
    "how",
    "what",
    "sings",
    "runs",
    "old",
]

MakeConfig = Callable[..., Config]
Shared = Callable[[str, Callable[[Path], object]], Path]


def save_target(
    directory: Path, *, template: str | None = TEMPLATE, vocab_size: int | None = None
) -> Path:
    """Write the target; another `vocab_size` pads its lm_head."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[1] *= 1.7  # random text ends with </s> after some 20 tokens
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[1])
    model.save_pretrained(directory)
    return directory


def save_seeds(path: Path, number: int = NUM_SEEDS) -> Path:
    """Conversations of two questions each, in ShareGPT form."""
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(2, 8)))

    roles = ("human", "gpt", "human", "gpt")
    rows = [
        {"id": "same", "conversations": [{"from": r, "value": text()} for r in roles]}
        for _ in range(number)
    ]
    write_lines(path, *rows)
    return path


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with `section__key=value` or `section__inner__key=value` changes."""
    out = copy.deepcopy(settings)
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return out


def tiny_settings(target: Path, seeds: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that finishes in seconds, with `section__key=value` changes."""
    usual: dict[str, Any] = {
        "run": {"name": "run", "root": str(root)},
        "target": {"model": str(target)},
        "seeds": {"sources": [{"path": str(seeds)}], "rows_per_shard": ROWS_PER_SHARD},
        "generate": {
            "engine": "transformers",
            "samples": 1,
            "max_new_tokens": 16,
            "rounds": 2,
        },
        "train": {
            "heads": "medusa",
            "num_heads": 3,
            "epochs": 1,
            "batch_tokens": 256,
            "warmup_steps": 1,
            "lr": 1e-2,
        },
        "calibrate": {"nodes": 8, "draft_tokens": 3},
        "check": {
            "prompts": 8,
            "max_new_tokens": NEW_TOKENS,
            "engines": ["native"],
            "repeats": 1,
            "baselines": [],
            "min_acceleration_rate": 0,
        },
        "limits": {"min_free_disk_gb": 0},
    }
    return merged(usual, changes)


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """`shared(name, make)`: a directory that all workers of this test run share; the first that
    asks fills it.
    """
    base = tmp_path_factory.getbasetemp()
    root = base.parent if hasattr(request.config, "workerinput") else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        directory, made = root / f"shared-{name}", root / f"shared-{name}.made"
        with (root / f"shared-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                make(directory)
                made.touch()
        return directory

    return get


@pytest.fixture(scope="session")
def tiny_target(shared: Shared) -> Path:
    """A Llama of 64 dimensions and 2 layers on disk."""
    return shared("target", save_target)


@pytest.fixture(scope="session")
def tiny_seeds(shared: Shared) -> Path:
    """40 conversations on disk."""
    return shared("seeds", lambda directory: save_seeds(directory / "seeds.jsonl")) / "seeds.jsonl"


@pytest.fixture(scope="session")
def make_settings(tiny_target: Path, tiny_seeds: Path) -> Callable[..., dict[str, Any]]:
    """Settings of a run that finishes in seconds: `make_settings(root, section__key=value, …)`."""
    return functools.partial(tiny_settings, tiny_target, tiny_seeds)


@pytest.fixture(scope="session")
def make_config(make_settings: Callable[..., dict[str, Any]]) -> MakeConfig:
    """The same as a configuration."""
    return lambda root, **changes: validate(make_settings(root, **changes), "test")


@pytest.fixture
def config_file(tmp_path: Path, make_settings: Callable[..., dict[str, Any]]) -> Path:
    """A configuration of a tiny run at `tmp_path/run`, as a YAML file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(make_settings(tmp_path)))
    return path


@pytest.fixture(scope="session")
def finished_run(shared: Shared, make_config: MakeConfig) -> RunDirectory:
    """The whole flow, run once in one process. Nobody writes into it: see `copied_run`."""
    return RunDirectory(
        shared("finished", lambda directory: run_again(make_config(directory))) / "run"
    )


def token_rows(stage: StageDirectory) -> Iterator[TokenRow]:
    return read_token_rows(stage.shards(), stage.fingerprint)


@pytest.fixture
def copied_run(tmp_path: Path, finished_run: RunDirectory) -> RunDirectory:
    """The finished run at `tmp_path/run`, to be run again or damaged."""
    shutil.copytree(finished_run.path, tmp_path / "run", symlinks=True)
    return RunDirectory(tmp_path / "run")


def resolved(
    config: Config, stages: Sequence[str] | None = None, fresh: str | None = None
) -> ResolvedRun:
    """The resolved run of these stages, by default of all that are wanted."""
    from pipeline.flow import wanted_stages
    from pipeline.run.resolved import resolve_run

    return resolve_run(config, stages or wanted_stages(config), fresh)


def context_of(config: Config, run: RunDirectory | None = None, **options: Any) -> Context:
    """A context without an executor's processes and without a word."""
    from rich.console import Console

    from pipeline.run.context import Context

    usual = {"console": Console(quiet=True), "executor_name": "inline"}
    run = run or RunDirectory(config.run.directory, config.run.store)
    return Context(resolved(config), run, **usual | options)


def run_again(config: Config, **options: object) -> RunDirectory:
    """Run the flow in this process, without a word."""
    from rich.console import Console

    from pipeline.flow import run_flow

    return run_flow(config, executor="inline", console=Console(quiet=True), **options)


@pytest.fixture
def again(make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunDirectory]:
    """`again(section__key=value, …)`: run the flow of `tmp_path`, until or fresh from a stage."""

    def run(until: str | None = None, fresh: str | None = None, **changes: object) -> RunDirectory:
        return run_again(make_config(tmp_path, **changes), until=until, fresh=fresh)

    return run


def report_of(run: RunDirectory) -> dict[str, Any]:
    """The content of report.json."""
    return json.loads((run.path / "report.json").read_text())


def changed_at(folder: Path) -> dict[Path, int]:
    """When each file and folder below one was last changed, in nanoseconds."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def write_lines(path: Path, *rows: object) -> str:
    """Write each row as a line of JSON; return the path as a setting has it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def stored(stage: StageDirectory | None) -> list[dict[str, Any]]:
    """Every row of a stage, in order."""
    assert stage is not None
    return [row for path in stage.shards() for row in read_rows(path)]


def quarantined(stage: StageDirectory) -> list[dict[str, Any]]:
    """Every quarantined row of a stage, in order."""
    files = sorted((stage.path / "quarantine").glob("*.jsonl"))
    return [row for file in files for row in read_lines(file)]


def edit_summary(run: RunDirectory, name: str, **changes: object) -> None:
    """Change what a finished stage's record says; None takes it out."""
    made = latest(run, name)
    assert made.done
    kept = {key: value for key, value in (made.summary | changes).items() if value is not None}
    replace(made.done, summary=kept).write(made.path)


def latest(run: RunDirectory, name: str) -> StageDirectory:
    """A stage that the run has reached."""
    stage = run.latest(name)
    assert stage is not None
    return stage


def last_events(run: RunDirectory) -> list[dict[str, Any]]:
    """The events of the newest run of this directory."""
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().split("\n")[:-1]]
    newest = max(index for index, event in enumerate(events) if event["event"] == "run-started")
    return events[newest:]


def stages_run(run: RunDirectory) -> list[str]:
    """The stages that the newest run did not keep."""
    return [event["stage"] for event in last_events(run) if event["event"] == "stage-started"]


def shards_made(run: RunDirectory) -> list[tuple[str, int]]:
    """The shards that the newest run committed."""
    return [
        (event["stage"], event["shard"]) for event in last_events(run) if event["event"] == "shard"
    ]


def contents(run: RunDirectory, *stages: str) -> dict[str, list[str]]:
    """Content hashes of the shards of each stage, in order."""
    found = {name: run.latest(name) for name in stages}
    return {
        name: [receipt.content_sha256 for _, receipt in sorted(stage.receipts().items())]
        for name, stage in found.items()
        if stage
    }
