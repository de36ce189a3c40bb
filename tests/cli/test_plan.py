"""`plan` says what a run would do, and does nothing of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from pipeline.cli.app import main
from pipeline.formatting import duration
from pipeline.targets.spec import TargetSpec, weight_files
from tests.cli.hub_to_read import REPOSITORY, HubToRead, serve
from tests.cli.tables import STAGES, line_of, one_paragraph, states
from tests.export.hub_stand_in import take_for_the_hub
from tests.flows.tiny import stored
from tests.forks import in_a_fork


@pytest.fixture(autouse=True)
def own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_plan_starts_and_writes_nothing(command, config_file, tmp_path):
    ended = command("plan", config_file)
    assert ended.code == 0, ended.err
    assert states(ended.out) == dict.fromkeys(STAGES, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_plan_says_what_is_kept_and_which_setting_makes_the_rest_run_again(
    command, config_file, copied_run
):
    before = {
        path: path.stat().st_mtime_ns for path in copied_run.path.rglob("*") if path.is_file()
    }
    ended = command("plan", config_file, "train.lr=0.5")
    assert states(ended.out) == dict.fromkeys(STAGES[:3], "kept") | dict.fromkeys(STAGES[3:], "run")
    assert "changed: lr" in line_of("train", ended.out)
    assert {
        path: path.stat().st_mtime_ns for path in copied_run.path.rglob("*") if path.is_file()
    } == before


def test_plan_counts_the_seeds_and_bounds_their_tokens_by_the_settings_or_the_context(
    command, config_file
):
    """2 answers of 16 tokens each, or 192 tokens of context; 64 states of 4 bytes each."""
    out = command("plan", config_file).out
    assert (
        f"40 conversations, at most {40 * 2 * 16:,} tokens to write" in out
        and "of 256 bytes each" in out
    )
    out = command("plan", config_file, "generate.rounds=99", "generate.max_new_tokens=99").out
    assert f"at most {40 * 192:,} tokens" in out


def test_plan_takes_the_true_numbers_of_what_is_done_and_of_nothing_else(
    command, config_file, copied_run
):
    rows = stored(copied_run.latest("generate"))
    tokens = sum(span["end"] - span["start"] for row in rows for span in row["spans"])
    assert f"{tokens:,} tokens written" in command("plan", config_file).out
    assert (
        f"at most {40 * 2 * 24:,} tokens"
        in command("plan", config_file, "generate.max_new_tokens=24").out
    )


def test_plan_says_how_many_steps_there_will_be_and_warns_of_too_few(
    command, config_file, copied_run
):
    """At most 2 answers of 15 tokens of each of the 24 conversations that are not held out."""
    few = ("train.batch_tokens=100", "train.epochs=3", "train.num_heads=2")
    out = command("plan", config_file, "generate.max_new_tokens=15", *few).out
    assert "Training: at most 24 steps: 3 epochs of 8 steps, 100 positions each" in out
    assert "24 optimizer steps are too few" in out and "train.epochs" in out
    out = command("plan", config_file, "train.batch_tokens=1").out
    assert re.search(r"Training: about \d+ steps: 1 epoch of", out) and "too few" not in out


def test_plan_of_a_hub_data_set_without_a_limit_claims_no_number(command, config_file):
    assert (
        "unknown number of conversations"
        in command("plan", config_file, "seeds.sources=[{hub: a/b}]").out
    )
    out = command("plan", config_file, "seeds.sources=[{hub: a/b, limit: 100}]").out
    assert f"100 conversations, at most {100 * 32:,} tokens" in out


def test_plan_names_a_target_that_cannot_be_fetched_now_and_what_it_assumes_of_it(
    command, config_file
):
    """4,096 states of 2 bytes each."""
    ended = command("plan", config_file, "target.model=owner/absent")
    assert ended.code == 0 and states(ended.out)["generate"] == "run"
    assert "owner/absent" in ended.out and "4,096 numbers in 16 bits" in ended.out
    assert "of 8,192 bytes each" in ended.out


def test_plan_says_that_what_is_kept_is_taken_for_granted_where_the_target_cannot_be_fetched(
    command, config_file, copied_run
):
    out = command("plan", config_file, "target.model=owner/absent").out
    assert states(out)["generate"] == "kept" and "taken to be unchanged" in line_of("generate", out)
    assert "taken to be unchanged" not in command("plan", config_file).out


@pytest.mark.parametrize(
    ("wrong", "code", "key"),
    [
        ("seeds.sources=/absent.jsonl", 2, "seeds.sources"),
        ("target.model=/absent", 2, "target.model"),
        ("push.repo_id=heads", 2, "push.repo_id"),
        ("calibrate.depth=9", 2, "calibrate.depth"),
        ("check.prompts=/absent.jsonl", 2, "check.prompts"),
    ],
)
def test_plan_refuses_what_run_refuses_also_where_all_is_finished(
    command, config_file, copied_run, wrong, code, key
):
    """Exit 0 and "kept" until now; `run` refuses each before it writes anything."""
    planned, ran = (command(name, config_file, wrong) for name in ("plan", "run"))
    assert (planned.code, planned.err) == (code, ran.err) and ran.code == code
    assert key in one_paragraph(planned.err)


@pytest.mark.parametrize(("gpus", "width"), [(0, 4), (1, 2)])
def test_plan_sizes_the_states_for_where_the_features_are_to_be_made(
    command, config_file, tiny_target, tmp_path, gpus, width
):
    """64 numbers each: the model's own 16 bits on a GPU, float32 on a CPU, whatever this machine
    has.
    """
    target = shutil.copytree(tiny_target, tmp_path / "half")
    config = (target / "config.json").read_text()
    (target / "config.json").write_text(config.replace('"float32"', '"bfloat16"'))
    words = (f"target.model={target}", f"placement.features.gpus_per_worker={gpus}")
    assert f"of {64 * width} bytes each" in command("plan", config_file, *words).out


def test_plan_prints_the_workers_that_this_machine_would_get(command, config_file):
    cores, gpus = len(os.sched_getaffinity(0)), min(1, torch.cuda.device_count())
    out = command(
        "plan", config_file, "placement.train.workers=2", "placement.train.cpus_per_worker=1"
    ).out
    if not gpus:
        assert f"generate: 1 worker(s), 0 GPU and {cores} CPU each" in out
        assert ("train: 2 worker(s), 0 GPU and 1 CPU each" in out) == (cores > 1)
    assert "default" not in out


def test_plan_says_what_does_not_fit_on_this_machine_and_goes_on(command, config_file):
    ended = command("plan", config_file, "placement.generate.gpus_per_worker=999")
    assert ended.code == 0
    assert re.search(
        r"generate: not on this machine\. The cluster cannot place generate: .*999 GPU", ended.out
    )
    assert "features: 1 worker(s)" in ended.out


def test_plan_leaves_a_cluster_s_numbers_to_the_cluster(command, config_file, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray.example:6379")
    out = command("plan", config_file, "placement.generate.gpus_per_worker=4").out
    assert "generate: workers 1, gpus_per_worker 4; the rest as the cluster has it" in out


def test_plan_of_a_target_without_weights_says_gib_and_refuses_what_cannot_fit(
    command, config_file, tmp_path
):
    """A Llama of 70B as a config.json alone. 80 columns, and plain where nobody looks."""
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    large = tmp_path / "large"
    large.mkdir()
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (large / "config.json").write_text(json.dumps(kind | sizes))
    spread = [f"placement.{stage}.gpus_per_worker=4" for stage in ("generate", "features")]
    words = (
        f"target.model={large}",
        "placement.gpu_memory_gb=80",
        "train.heads=medusa",
        "train.num_heads=5",
        *spread,
    )
    ended = command("plan", config_file, *words, "train.batch_tokens=auto")
    assert ended.code == 0 and "holds no weights" in ended.out, "87 of 80 GiB are within 20 %"
    assert "2 checkpoint(s) of 67.1 GB" in ended.out, (
        "12 bytes for each of 5 x 8,192 x 136,449 numbers"
    )
    assert (
        states(ended.out)["generate"] == "run"
        and f"{40 * 32:,} tokens" in ended.out
        and "16,384 bytes" in ended.out
    )
    table = ended.out.partition("GiB  ")[2].splitlines()[1:5]
    assert [line.split()[0].rstrip(",") for line in table] == [
        "generate",
        "features",
        "train",
        "check",
    ]
    assert float(line_of("train", "\n".join(table)).split()[1]) == pytest.approx(
        5 * 8192 * 136449 * 4 / 2**30, abs=0.06
    )
    assert max(map(len, table)) <= 80 and "\x1b" not in ended.out
    ended = command("plan", config_file, *words, "placement.gpu_memory_gb=60")
    refused = one_paragraph(ended.err)
    assert (
        ended.code == 4
        and "train" in refused
        and "generate" not in refused
        and "train.optimizer" in refused
    )


@pytest.mark.slow
def test_hours_are_at_the_rate_of_a_finished_stage_in_the_store(command, config_file, copied_run):
    """At most 2 answers of 24 tokens of each of 40 conversations."""
    done = json.loads((copied_run.latest("generate").path / "DONE.json").read_text())
    seconds = 40 * 2 * 24 / done["summary"]["tokens_per_second"]
    out = command("plan", config_file, "generate.max_new_tokens=24").out
    assert f"generate: at most {duration(seconds)}, at" in out and "features: at most" in out
    assert "at most" not in command("plan", config_file).out.partition("Memory")[0], (
        "all is finished"
    )
    assert "tokens/s" not in command("plan", config_file, "run.name=next").out


def test_a_missing_package_is_noted_in_a_plan(command, config_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = command("plan", config_file, "generate.engine=vllm")
    assert ended.code == 0 and "! vllm is not installed here" in ended.out


def test_a_hub_that_does_not_answer_is_asked_once(command, config_file, monkeypatch):
    """The client would try six times for every file, and wait in between."""
    asked = []

    class Client:
        def head(self, url, timeout):
            asked.append(url)
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_session", Client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time.sleep", lambda seconds: asked.append("waits")
    )
    ended = command("plan", config_file, "target.model=nobody/nothing")
    assert ended.code == 0 and "nobody/nothing can be neither read nor fetched now" in " ".join(
        ended.out.split()
    )
    assert (
        asked == ["http://127.0.0.1:1/api/models/nobody/nothing"]
        and constants.HF_HUB_OFFLINE is False
    )
    assert command("plan", config_file).code == 0 and len(asked) == 1, "a directory"


@pytest.fixture
def hub(tiny_target: Path) -> Iterator[HubToRead]:
    with serve(tiny_target) as served:
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
    assert set(hub.fetched) == {"config.json", "generation_config.json"}
    assert f"The target {REPOSITORY} is not on this machine yet" in line_of("generate", out)
    assert states(out)["seeds"] == states(out)["generate"] == "run"
    assert "of 256 bytes each" in out and "assumed" not in out, (
        "its configuration says how large a state is"
    )

    hub.fetched.clear()
    code, known = in_a_fork(plan_elsewhere, hub.endpoint, config_file, True)
    assert code == 0 and "never run" in line_of("generate", known), "now its content is known"
    assert "model.safetensors" in hub.fetched and len(hub.fetched) == len({*hub.fetched}), (
        "nothing came twice"
    )
