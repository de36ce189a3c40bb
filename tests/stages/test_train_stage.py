"""What of the settings a training depends on: no key that its method never reads, and none that
says how it is run.
"""

from __future__ import annotations

import pytest

from pipeline.heads.medusa import MedusaHeads
from pipeline.stages import train
from pipeline.storage.fingerprint import fingerprint
from tests.flows.tiny import context_of

MEDUSA_2 = {"train__method": "medusa-2"}
TWO_STAGE = MEDUSA_2 | {"train__backbone__recipe": "two-stage"}


@pytest.fixture
def identity(make_config, tmp_path):
    def of(**changes) -> str:
        config = make_config(tmp_path, **changes)
        return fingerprint(train.identity(context_of(config)))

    return of


def test_a_changed_kind_of_heads_is_trained_again(identity, monkeypatch):
    before = identity()
    monkeypatch.setattr(MedusaHeads, "version", MedusaHeads.version + 1)
    assert identity() != before


def test_heads_alone_are_named_by_the_common_keys_and_their_kind_s_own(make_config, tmp_path):
    config = make_config(tmp_path)
    settings = train.identity(context_of(config))["settings"]
    common = {
        "heads",
        "method",
        "num_heads",
        "medusa",
        "decay",
        "roles",
        "lr",
        "epochs",
        "batch_tokens",
    }
    assert set(settings) == common | {
        "warmup_steps",
        "optimizer",
        "weight_decay",
        "max_grad_norm",
        "precision",
        "patience",
        "soft_labels",
        "draft_vocab",
        "noise",
    }
    assert set(settings["medusa"]) == {"num_layers", "lm_head"}


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ({}, "backbone__lambda_0", 0.5),
        ({}, "backbone__lora_rank", 3),
        ({}, "backbone__sequence_length", 100),
        ({}, "backbone__recipe", "two-stage"),
        (MEDUSA_2, "batch_tokens", 99),
        (MEDUSA_2, "backbone__max_kl", 0.5),
        (MEDUSA_2, "backbone__micro_batch", 4),
        (MEDUSA_2, "backbone__gradient_checkpointing", False),
        (MEDUSA_2, "backbone__shard", True),
        (MEDUSA_2, "backbone__quantization", "none"),
        (MEDUSA_2 | {"target__quantization": "4bit"}, "backbone__quantization", "4bit"),
        ({}, "backbone__quantization", "4bit"),
        (TWO_STAGE, "checkpoint_every", 7),
    ],
)
def test_what_makes_no_difference_leaves_a_training_s_name_alone(identity, method, key, value):
    assert identity(**method, **{f"train__{key}": value}) == identity(**method)


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ({}, "method", "medusa-2"),
        ({}, "medusa__num_layers", 2),
        ({}, "batch_tokens", 99),
        (MEDUSA_2, "backbone__recipe", "two-stage"),
        (MEDUSA_2, "backbone__loss", "ce"),
        (MEDUSA_2, "backbone__lr", 1e-5),
        (MEDUSA_2, "backbone__lora_dropout", 0.1),
        (MEDUSA_2, "backbone__batch_sequences", 3),
        (MEDUSA_2, "backbone__quantization", "4bit"),
        (MEDUSA_2 | {"target__quantization": "4bit"}, "backbone__quantization", "none"),
        (TWO_STAGE, "batch_tokens", 99),
    ],
)
def test_what_makes_a_difference_gives_it_another(identity, method, key, value):
    assert identity(**method | {f"train__{key}": value}) != identity(**method)


@pytest.mark.parametrize(
    ("changes", "stages"),
    [({}, ("features",)), (MEDUSA_2, ("generate",)), (TWO_STAGE, ("features", "generate"))],
)
def test_each_method_reads_what_it_trains_from(make_config, tmp_path, changes, stages):
    assert train.upstream(make_config(tmp_path, **changes)) == stages


def test_too_few_steps_to_learn_anything_are_told_in_the_record_and_the_report(finished_run):
    summary = finished_run.latest("train").summary
    said = f"{summary['steps']} optimizer steps are too few"
    assert any(warning.startswith(said) for warning in summary["warnings"])
    assert said in (finished_run.path / "report.md").read_text()
