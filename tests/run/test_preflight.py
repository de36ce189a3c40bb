"""What a later stage could not carry out is refused before anything is started."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from pipeline.config.load import validate
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.machine import SUBMITTED_JOB
from pipeline.run import readable_targets
from pipeline.run.preflight import check_config, unread_settings
from tests.flows.tiny import save_target
from tests.forks import in_a_fork

HUB = {"target__model": "owner/model"}
MEDUSA_2 = {"train__method": "medusa-2"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train__num_heads": 129}, "train.num_heads"),
        ({"train__heads": "medus"}, r"train\.heads.*Did you mean medusa"),
        ({"train__method": "medusa1"}, r"train\.method.*Did you mean 'medusa-1'"),
        ({"calibrate__depth": 4}, "calibrate.depth"),
        ({"generate__max_new_tokens": 3}, r"head 2 .*train\.num_heads.*at most 2 heads"),
        (
            {"generate__max_new_tokens": 1},
            r"head 2 .*train\.num_heads.*Raise generate\.max_new_tokens",
        ),
        ({"check__max_new_tokens": 192}, r"context of 192.*check\.max_new_tokens"),
        (
            {"check__max_tokens": 40, "check__max_new_tokens": 40},
            r"context of 40.*check\.max_new_tokens",
        ),
        ({"export__formats": ["shared"]}, "export.formats"),
        ({"export__formats": ["reference"]}, r"\[expanded, reference\]"),
        ({"calibrate__choices": "/absent.json"}, "calibrate.choices"),
        ({"train__draft_vocab": 301}, r"301 .* has 300 \(train\.draft_vocab\)"),
        ({"train__draft_vocab": 9}, r"only 9 tokens \(calibrate\.top\).*at most 9"),
        (
            {"calibrate__tree": "dynamic", "calibrate__top": 301},
            r"only 300 tokens \(calibrate\.top\)",
        ),
        (
            {
                "train__draft_vocab": 40,
                "train__heads": "recurrent",
                "check__engines": ["native", "vllm"],
            },
            r"train\.draft_vocab.*natively only.*check\.engines.*\[native\]",
        ),
        ({"check__prompts": "/absent.jsonl"}, "check.prompts"),
        ({"push__repo_id": "me/heads"}, "push.base_model"),
        ({"push__repo_id": "heads", **HUB}, "push.repo_id"),
        ({"push__repo_id": "me/heads", "push__base_model": "not an id"}, "push.base_model"),
        ({"train__backbone__lora_rank": 65, **MEDUSA_2}, "train.backbone.lora_rank"),
        ({"target__model": "/absent", **MEDUSA_2}, "target"),
        (
            {"train__backbone__shard": True, "target__quantization": "4bit", **MEDUSA_2},
            "train.backbone.shard",
        ),
        (
            {"train__backbone__shard": True, "train__backbone__quantization": "8bit", **MEDUSA_2},
            "train.backbone.shard",
        ),
    ],
)
def test_it_is_refused_and_the_key_is_named(make_config, tmp_path, changes, key):
    with pytest.raises(ConfigError, match=key) as caught:
        check_config(make_config(tmp_path, **changes))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__num_heads": 128, "generate__max_new_tokens": 129},
        {"generate__max_new_tokens": 4},
        {"generate__max_new_tokens": 3, "generate__mode": "passthrough"},
        {"check__max_new_tokens": 191},
        {"calibrate__depth": 3},
        {"export__formats": ["shared"], "train__medusa__lm_head": "tied"},
        {"push__repo_id": "me/heads", **HUB},
        {"push__repo_id": "me/heads", "push__base_model": "owner/model"},
        MEDUSA_2,
        {"train__backbone__shard": True, **MEDUSA_2},
        {"train__backbone__lora_rank": 65},
        {"train__backbone__shard": True, "target__quantization": "4bit"},
        {
            "train__backbone__shard": True,
            "target__quantization": "4bit",
            "train__backbone__quantization": "none",
            **MEDUSA_2,
        },
    ],
)
def test_it_is_allowed(make_config, tmp_path, changes):
    check_config(make_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"generate__engine": "vllm"}, "Set generate.engine=transformers;"),
        ({"features__engine": "vllm"}, "Set features.engine=transformers;"),
        ({"check__engines": ["native", "vllm"]}, r"Set check.engines=\[native\];"),
    ],
)
def test_a_target_in_8_bit_is_refused_to_vllm_before_anything_is_made(
    make_config, tmp_path, changes, fix
):
    """The check would otherwise find out after everything else."""
    with pytest.raises(ConfigError, match=rf"target\.quantization = 8bit.*{fix}"):
        check_config(make_config(tmp_path, target__quantization="8bit", **changes))
    check_config(make_config(tmp_path, **changes))


def test_an_engine_that_is_told_otherwise_or_never_asked_may_have_a_target_in_8_bit(
    make_config, tmp_path
):
    quantized = {"target__quantization": "8bit", "generate__engine": "vllm"}
    check_config(make_config(tmp_path, **quantized, generate__engine_args={"quantization": "fp8"}))
    check_config(make_config(tmp_path, **quantized, generate__mode="passthrough"))


def test_keys_that_the_chosen_kind_and_method_never_read_are_warned_of(make_config, tmp_path):
    assert unread_settings(make_config(tmp_path)) == []
    changes = {"train__backbone__lora_rank": 4, "train__backbone__lr": 1e-4}
    (warning,) = unread_settings(make_config(tmp_path, **changes))
    assert (
        "train.backbone.lora_rank" in warning
        and "train.backbone.lr" in warning
        and "medusa-1" in warning
    )
    assert unread_settings(make_config(tmp_path, **changes, **MEDUSA_2)) == []


def test_a_submitted_job_keeps_nothing_in_its_uploaded_copy(make_config, tmp_path, monkeypatch):
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    inside, outside = tmp_path / "copy" / "runs", tmp_path / "runs"
    check_config(make_config(inside))
    monkeypatch.setenv(SUBMITTED_JOB, "{}")
    check_config(make_config(outside))
    with pytest.raises(ConfigError, match=r"run\.root"):
        check_config(make_config(inside))
    with pytest.raises(ConfigError, match=r"run\.store"):
        check_config(make_config(outside, run__store=str(inside)))


WANTS = [
    ({"generate__engine": "vllm"}, "vllm", "generate.engine", "generate"),
    ({"features__engine": "vllm"}, "vllm", "features.engine", "features"),
    ({"check__engines": ["native", "vllm"]}, "vllm", "check.engines", "check"),
    ({"train__optimizer": "adamw-8bit"}, "bitsandbytes", "train.optimizer", "train"),
    ({"target__quantization": "8bit"}, "bitsandbytes", "target.quantization", "features"),
    (
        {"train__backbone__quantization": "4bit"} | MEDUSA_2,
        "bitsandbytes",
        "train.backbone.quantization",
        "train",
    ),
    (MEDUSA_2, "peft", "train.method", "train"),
]


@pytest.fixture
def own_machine(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(("changes", "package", "key", "stage"), WANTS)
def test_a_package_that_is_not_installed_is_named_before_anything_is_made(
    make_config, tmp_path, monkeypatch, own_machine, changes, package, key, stage
):
    config = make_config(tmp_path / "runs", **changes)
    check_config(config)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        EnvironmentFault, match=f"not installed here, and {stage} needs it.*{key}"
    ) as caught:
        check_config(config)
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("changes", "package", "key", "stage"), WANTS)
def test_a_package_is_not_asked_for_where_it_is_not_needed_here(
    make_config, tmp_path, monkeypatch, own_machine, changes, package, key, stage
):
    """By a stage that is not to run, by one that was made elsewhere, or on a cluster, whose nodes
    have their own.
    """
    config = make_config(tmp_path, **changes)
    monkeypatch.setitem(sys.modules, package, None)
    check_config(config, {"seeds", "generate", "features", "train", "check"} - {stage})
    with monkeypatch.context() as on_cluster:
        on_cluster.setenv("RAY_ADDRESS", "auto")
        check_config(config)
    made = config.run.directory / f"{stage}-0123abcd"
    made.mkdir(parents=True)
    with pytest.raises(EnvironmentFault):
        check_config(config)  # begun, and not finished
    (made / "DONE.json").write_text("{}")
    check_config(config)


def test_a_quantized_target_trains_quantized_too_unless_it_is_said(
    make_config, tmp_path, monkeypatch, own_machine
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    quantized = {"target__quantization": "4bit", **MEDUSA_2}
    with pytest.raises(EnvironmentFault, match=r"train needs it.*target\.quantization"):
        check_config(make_config(tmp_path, **quantized), {"train"})
    check_config(
        make_config(tmp_path, **quantized, train__backbone__quantization="none"), {"train"}
    )


def test_replies_that_the_seeds_bring_need_no_engine(
    make_config, tmp_path, monkeypatch, own_machine
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    check_config(make_config(tmp_path, generate__engine="vllm", generate__mode="passthrough"))


def look_for_packages(settings: dict) -> None:
    check_config(validate(settings, "test"))
    print([name for name in ("vllm", "bitsandbytes") if name in sys.modules])


@pytest.mark.slow
def test_looking_for_a_package_does_not_import_it(make_settings, tmp_path):
    settings = make_settings(tmp_path, generate__engine="vllm", train__optimizer="adamw-8bit")
    assert in_a_fork(look_for_packages, settings) == (0, "[]\n")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"acceptance": "rejection"}, r"rejection acceptance is greedy.*check\.temperature"),
        ({"acceptance": "typical", "temperature": 0.7, "top_p": 0.9}, r"no effect.*check\.top_p"),
        (
            {"acceptance": "rejection", "temperature": 0.7, "first_token": "sampled"},
            r"no effect.*check\.first_token",
        ),
    ],
)
def test_a_rule_with_numbers_that_it_cannot_use_is_refused(make_config, tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        check_config(
            make_config(tmp_path, **{f"check__{key}": value for key, value in changes.items()})
        )


def test_every_rule_has_numbers_that_it_takes(make_config, tmp_path):
    for rule, more in {"typical": {"first_token": "sampled"}, "rejection": {"top_p": 0.9}}.items():
        changes = {"acceptance": rule, "temperature": 0.7, **more}
        check_config(
            make_config(tmp_path, **{f"check__{key}": value for key, value in changes.items()})
        )


def test_medusa_2_takes_no_second_gpu_for_a_worker_that_would_not_use_it(make_config, tmp_path):
    config = make_config(tmp_path, **MEDUSA_2, placement__train={"gpus_per_worker": 2})
    with pytest.raises(ConfigError, match=r"one GPU per worker.*train\.backbone\.shard"):
        check_config(config, ["train"])
    check_config(make_config(tmp_path, placement__train={"gpus_per_worker": 2}), ["train"])


def test_a_plan_notes_an_assistant_that_only_this_machine_cannot_reach(make_config, tmp_path):
    config = make_config(
        tmp_path, check__assistant_model="owner/model", check__baselines=["assistant"]
    )
    notes: list[str] = []
    with pytest.raises(EnvironmentFault, match="owner/model"):
        check_config(config)
    check_config(config, notes=notes)
    assert "owner/model" in " ".join(notes)


@pytest.mark.parametrize("stages", [None, {"seeds", "generate"}], ids=["all", "until generate"])
def test_a_target_that_ends_at_no_token_is_refused_before_anything_starts(
    make_config, tmp_path, tiny_target, stages
):
    target = shutil.copytree(tiny_target, tmp_path / "target")
    config = make_config(tmp_path / "runs", target__model=str(target))
    check_config(config, stages)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [True]}))
    with pytest.raises(ConfigError, match=r"eos_token_id.*generation_config\.json"):
        check_config(config, stages)


def test_a_target_on_the_hub_is_looked_at_before_its_first_stage(
    make_config, tmp_path, monkeypatch
):
    def refuse(target: object) -> None:
        raise ConfigError("It is no target.", "target.model")

    monkeypatch.setattr("pipeline.run.lengths.resolve", refuse)
    config = make_config(tmp_path, **HUB)
    check_config(config, {"seeds"})
    with pytest.raises(ConfigError, match=r"target\.model"):
        check_config(config, {"seeds", "generate"})


def test_a_served_model_of_another_vocabulary_is_refused_before_anything_starts(
    make_config, tmp_path
):
    other = save_target(tmp_path / "other", vocab_size=320)
    with pytest.raises(ConfigError, match=r"vocabulary of 320.*one of 300.*check\.served_model"):
        check_config(make_config(tmp_path, check__served_model=str(other)))
    with pytest.raises(ConfigError, match=r"check\.served_model"):
        check_config(make_config(tmp_path, check__served_model="/absent"))


def test_workers_without_gpus_read_a_quantized_target_on_the_cpu_also_where_a_gpu_is(
    make_config, tmp_path, tiny_target, monkeypatch
):
    asked = set()

    def readable(spec, engine, *, on_gpu, where):
        asked.add((where, engine, on_gpu))

    for module in ("pipeline.run.readable_targets", "pipeline.run.served_copy"):
        monkeypatch.setattr(f"{module}.require_readable", readable)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    placed = {"placement__features": {"gpus_per_worker": 0}, "generate__engine": "vllm"}
    checked = {"check__engines": ["native", "vllm"], "check__served_model": str(copy)}
    readable_targets.check_readers(make_config(tmp_path, **placed, **checked))
    of_each = {("transformers", False), ("native", False), ("vllm", True)}
    assert asked == {("target.model", *one) for one in of_each} | {
        ("check.served_model", "native", False),
        ("check.served_model", "vllm", True),
    }


@pytest.mark.parametrize("key", ["check__served_model", "target__model"])
def test_a_quantized_target_that_an_engine_cannot_read_is_refused_before_anything_starts(
    make_config, tmp_path, tiny_target, key
):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    config = json.loads((copy / "config.json").read_text())
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match="no bitsandbytes"):
        check_config(make_config(tmp_path, check__engines=["native", "vllm"], **{key: str(copy)}))
