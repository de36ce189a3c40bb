"""`plan` says what a run would do, and does nothing of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.cli.app import main
from pipeline.formatting import duration
from pipeline.targets.spec import TargetSpec, weight_files
from tests.cli.tables import line_of, one_paragraph, states
from tests.export.hub_stand_in import HubStandIn, Repository, take_for_the_hub
from tests.flows.tiny import STAGES, changed_at, stored
from tests.forks import in_a_fork
from tests.models.published import write

AUTO_DRAFTS = "calibrate.draft_tokens=auto"


@pytest.fixture(autouse=True)
def own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_plan_starts_and_writes_nothing(command, config_file, tmp_path):
    ended = command("plan", config_file)
    assert ended.code == 0, ended.err
    assert states(ended.out) == dict.fromkeys(STAGES, "run") and "pending" not in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_plan_names_the_setting_that_makes_stages_run_again(command, config_file, copied_run):
    before = changed_at(copied_run.path)
    out = command("plan", config_file, "train.lr=0.5").out
    assert states(out) == dict.fromkeys(STAGES[:3], "kept") | dict.fromkeys(STAGES[3:], "run")
    assert "changed: lr" in line_of("train", out)
    assert changed_at(copied_run.path) == before
    rows = stored(copied_run.latest("generate"))
    tokens = sum(span["end"] - span["start"] for row in rows for span in row["spans"])
    assert f"conversations, {tokens:,} tokens" in out, "the true number of what is done"


@pytest.mark.parametrize(
    ("words", "said", "tokens"),
    [
        ((), "40 conversations", 40 * 2 * 16),  # two answers
        (("generate.rounds=99", "generate.max_new_tokens=99"), "40 conversations", 40 * 192),
        (("seeds.sources=[{hub: a/b, limit: 100}]",), "100 conversations", 100 * 2 * 16),
        (("generate.samples=3",), "3 answers to each training prompt", (40 + 2 * 24) * 2 * 16),
    ],
)
def test_plan_bounds_tokens_and_states(command, config_file, words, said, tokens):
    """64 numbers of 4 bytes each."""
    out = command("plan", config_file, *words).out
    assert f"{said}, at most {tokens:,} tokens" in out
    assert "256 bytes of states" in out
    unknown = command("plan", config_file, "seeds.sources=[{hub: a/b}]").out
    assert "unknown number of conversations" in unknown


def test_plan_counts_the_outputs_of_layers_at_every_token(command, config_file):
    """1,280 tokens and three tenths as many of prompts, 256 bytes each, of every layer."""
    out = command("plan", config_file, "train.heads=eagle3", "train.eagle3.layers=[1,2]").out
    assert line_of("row-features", out).split()[1] == "run"
    assert "256 bytes of states per token, 1.2 MB" in out  # 1,280 and 2 x 1,664 of them
    assert "outputs of 2 layers at every token" in out and "about 426.0 kB per layer" in out
    last = command("plan", config_file, "train.heads=eagle3", "train.eagle3.layers=last").out
    assert "outputs of one layer at every token" in last
    assert "row-features" not in command("plan", config_file).out


def test_plan_counts_steps_and_warns_of_too_few(command, config_file, copied_run):
    """At most 2 answers of 15 tokens of each of the 24 conversations that are not held out."""
    out = command("plan", config_file, "train.batch_tokens=1").out
    assert re.search(r"Training: about \d+ steps: 1 epoch of", out) and "Too few" not in out
    shutil.rmtree(copied_run.latest("generate").path)
    few = ("train.batch_tokens=100", "train.epochs=3", "train.num_heads=2", AUTO_DRAFTS)
    out = command("plan", config_file, "generate.max_new_tokens=15", *few).out
    assert "Training: at most 24 steps: 3 epochs of 8 steps, 100 positions each" in out
    assert "Too few optimizer steps (24)" in out and "train.epochs" in out


def test_a_nearly_full_disk_is_refused_before_the_first_stage(command, config_file, copied_run):
    """`plan` has it as a note. A run with nothing to make needs no space."""
    full, refusal = "limits.min_free_disk_gb=1e9", "less than limits.min_free_disk_gb = 1000000000"
    changed = (config_file, full, "seeds.holdout=0.3")
    ended = command("plan", *changed)
    assert ended.code == 0 and refusal in ended.out
    ended = command("run", *changed, "--executor", "inline")
    assert ended.code == 4 and refusal in ended.err and "✓" not in ended.out
    assert refusal not in command("plan", config_file, full).out
    assert command("run", config_file, full, "--executor", "inline").code == 0


def test_plan_goes_on_without_the_target(command, config_file, copied_run):
    """Sizes are unknown, and stages are as the run links to them."""
    ended = command("plan", config_file, "target.model=owner/absent", "train.draft_vocab=40")
    assert ended.code == 0 and states(ended.out)["generate"] == "kept"
    assert "owner/absent" in ended.out and "bytes of states" not in ended.out
    assert "states of unknown size" in ended.out and "Training:" not in ended.out
    assert "assumed unchanged" in line_of("generate", ended.out)
    assert "assumed unchanged" not in command("plan", config_file).out


def test_plan_prints_the_workers_of_each_stage(command, config_file):
    """A worker that this machine cannot place is a note."""
    cores = len(os.sched_getaffinity(0))
    words = ("placement.features.gpus_per_worker=0", "placement.generate.cpus_per_worker=9999")
    ended = command("plan", config_file, *words)
    assert ended.code == 0 and f"features: 1 worker(s), 0 GPU and {cores} CPU each" in ended.out
    assert re.search(r"! generate: .* 9999 CPU .*`run` will refuse this here\.", ended.out)


def test_plan_without_weights_prints_gib_and_refuses_misfits(command, config_file, tmp_path):
    """A Llama of 70B as a config.json alone. 80 columns, and plain where nobody looks."""
    large = write("meta-llama/Llama-3.1-70B-Instruct", tmp_path / "large")
    spread = [f"placement.{stage}.gpus_per_worker=4" for stage in ("generate", "features")]
    words = (
        f"target.model={large}",
        "placement.gpu_memory_gb=80",
        "train.heads=medusa",
        "train.num_heads=5",
        *spread,
    )
    ended = command("plan", config_file, *words, "train.batch_tokens=auto")
    assert ended.code == 0, "87 of 80 GiB are within 20 %"
    assert f"{40 * 32:,} tokens" in ended.out and "16,384 bytes" in ended.out
    table = ended.out.partition("GiB  ")[2].splitlines()[1:5]
    assert float(line_of("train", "\n".join(table)).split()[1]) == pytest.approx(
        5 * 8192 * 136449 * 4 / 2**30, abs=0.06
    )
    assert max(map(len, table)) <= 80 and "\x1b" not in ended.out
    ended = command("plan", config_file, *words, "placement.gpu_memory_gb=60")
    refused = one_paragraph(ended.err)
    assert ended.code == 4 and "train.optimizer" in refused and "generate" not in refused


def test_plan_refuses_too_few_conversations(command, config_file, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("\n".join(f"Where is clock {number}?" for number in range(23)))
    ended = command("plan", config_file, f"seeds.sources={few}")
    assert ended.code == 3
    assert "23 conversations are too few" in one_paragraph(ended.err)
    with few.open("a") as file:
        file.write("\nWhen does it open?")
    assert command("plan", config_file, f"seeds.sources={few}").code == 0


@pytest.mark.slow
def test_hours_are_estimated_from_finished_stages(command, config_file, copied_run):
    """At most two answers of 24 tokens in 40 conversations."""
    seconds = 40 * 2 * 24 / copied_run.latest("generate").summary["tokens_per_second"]
    out = command("plan", config_file, "generate.max_new_tokens=24").out
    assert f"generate: up to about {duration(seconds)}, at" in out and "features: up to" in out
    assert ", at the" not in command("plan", config_file).out, "all is finished"


@pytest.mark.slow
def test_rates_are_those_of_the_same_target_and_kind_of_heads(
    command, config_file, copied_run, tiny_target, tmp_path
):
    out = command("plan", config_file, "train.lr=0.5").out
    assert re.search("train: about .*, at the", out)
    for word in ("train.heads=recurrent", "train.method=medusa-2"):
        assert re.search("train: about .*, by arithmetic", command("plan", config_file, word).out)
    other = shutil.copytree(tiny_target, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    out = command("plan", config_file, f"target.model={other}").out
    assert "tokens/s" not in out
    assert re.search("generate: up to about .*, by arithmetic", out)


REPOSITORY = "owner/model"


@pytest.fixture
def hub(tiny_target: Path) -> Iterator[HubStandIn]:
    files = {file.name: file.read_bytes() for file in tiny_target.iterdir()}
    with HubStandIn() as served:
        served.repositories[REPOSITORY] = Repository(private=False, commits=[files])
        yield served


def plan_elsewhere(endpoint: str, config: Path, downloaded: bool) -> None:
    """On a machine whose cache has nothing, or the weights alone."""
    take_for_the_hub(pytest.MonkeyPatch(), endpoint, config.parent)
    constants.HF_HUB_CACHE = str(config.parent / "cache")
    if downloaded:
        weight_files(TargetSpec(REPOSITORY))
    sys.argv = ["medusa-distill", "plan", str(config), f"target.model={REPOSITORY}"]
    main()


@pytest.mark.slow
def test_plan_downloads_no_weights(config_file, hub):
    code, out = in_a_fork(plan_elsewhere, hub.endpoint, config_file, False)
    assert code == 0, out
    described = {"config.json", "generation_config.json", "chat_template.jinja"}
    assert set(hub.fetched) == described | {"tokenizer_config.json", "tokenizer.json"}
    assert states(out)["seeds"] == states(out)["generate"] == "run"
    assert "256 bytes of states" in out, "its configuration says how large a state is"

    hub.requests.clear()
    code, known = in_a_fork(plan_elsewhere, hub.endpoint, config_file, True)
    assert code == 0 and "never run" in line_of("generate", known), "now its content is known"
    assert "model.safetensors" in hub.fetched and len(hub.fetched) == len({*hub.fetched}), (
        "nothing came twice"
    )


def test_plan_warns_of_text_that_is_not_read(command, config_file, tmp_path):
    seeds = tmp_path / "dolly.jsonl"
    row = {"context": "The wall is long. " * 9, "response": "So."}
    rows = [row | {"instruction": f"Where is clock {number}?"} for number in range(40)]
    seeds.write_text("\n".join(map(json.dumps, rows)))
    planned = command("plan", config_file, f"seeds.sources={seeds}").out
    assert "! `context` has text in 40 of 40 rows of dolly" in planned


def test_plan_counts_what_the_seeds_stage_keeps(command, config_file, tmp_path):
    """40 rows: one has pictures, two repeat others, and one is a question of the check."""
    seeds, questions = tmp_path / "mixed.jsonl", tmp_path / "questions.jsonl"
    rows: list[dict[str, object]]
    rows = [{"prompt": f"Where is clock {number}?"} for number in range(36)]
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    rows += [{"messages": [{"role": "user", "content": picture}]}, rows[0], rows[1]]
    rows.append({"prompt": "Where is the rose garden of the town, and when does it open?"})
    seeds.write_text("\n".join(map(json.dumps, rows)))
    questions.write_text(json.dumps(rows[-1]))
    words = (f"seeds.sources={seeds}", f"check.prompts={questions}")
    planned = command("plan", config_file, *words).out
    assert command("run", config_file, *words, "--until", "seeds", "--executor", "inline").code == 0
    stage = next((tmp_path / "run").glob("seeds-*/DONE.json"))
    summary = json.loads(stage.read_text())["summary"]
    assert summary["rows"] == 36 and summary["quarantined"] == 4
    assert "36 conversations" in planned and "The seeds stage drops 4 rows:" in planned
    for reason, number in summary["reasons"].items():
        assert f"{reason} {number}" in planned


@pytest.mark.slow
def test_more_than_a_day_is_a_warning_with_what_helps(command, config_file, tmp_path, monkeypatch):
    """A Llama of 70B on a CPU of 1 TFLOP/s."""
    monkeypatch.setattr("pipeline.run.estimate.machine_memory", lambda: 1000.0 * 2**30)
    monkeypatch.setattr("pipeline.run.hours.product_rate", lambda: 1e12)
    large = write("meta-llama/Llama-3.1-70B-Instruct", tmp_path / "large")
    words = (f"target.model={large}", "seeds.sources=[{hub: a/b, limit: 50000}]")
    out = command("plan", config_file, *words, "train.heads=recurrent", "train.num_heads=5").out
    assert "! This takes more than a day. What helps most: a GPU, a limit in seeds.sources" in out
    assert "more than a day" not in command("plan", config_file).out
