"""A training depends on no key that its method never reads, and on none of its execution."""

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


SAME = [
    ({}, "backbone__lora_rank", 3),
    ({}, "backbone__recipe", "two-stage"),
    (MEDUSA_2, "batch_tokens", 99),
    (MEDUSA_2, "backbone__max_kl", 0.5),
    (MEDUSA_2, "backbone__shard", True),
    (MEDUSA_2, "backbone__quantization", "none"),
    (MEDUSA_2 | {"target__quantization": "4bit"}, "backbone__quantization", "4bit"),
    (TWO_STAGE, "checkpoint_every", 7),
]
OTHER = [
    ({}, "method", "medusa-2"),
    ({}, "medusa__num_layers", 2),
    ({}, "batch_tokens", 99),
    (MEDUSA_2, "backbone__recipe", "two-stage"),
    (MEDUSA_2, "backbone__loss", "ce"),
    (MEDUSA_2, "backbone__batch_sequences", 3),
    (MEDUSA_2, "backbone__quantization", "4bit"),
    (MEDUSA_2 | {"target__quantization": "4bit"}, "backbone__quantization", "none"),
    (TWO_STAGE, "batch_tokens", 99),
    ({}, "epochs", 2),
    ({}, "precision", "bf16"),
    ({}, "medusa__lm_head", "tied"),
]


@pytest.mark.parametrize(("method", "key", "value"), SAME + OTHER)
def test_a_training_is_named_by_the_settings_that_it_reads(identity, method, key, value):
    is_same = (method, key, value) in SAME
    assert (identity(**method | {f"train__{key}": value}) == identity(**method)) == is_same


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, ("features",)),
        (MEDUSA_2, ("generate",)),
        (TWO_STAGE, ("features", "generate")),
        ({"train__heads": "eagle3"}, ("features", "row-features")),
    ],
)
def test_each_method_reads_what_it_trains_from(make_config, tmp_path, changes, stages):
    assert train.upstream(make_config(tmp_path, **changes)) == stages


def test_too_few_steps_are_reported(finished_run):
    summary = finished_run.latest("train").summary
    warning = f"Too few optimizer steps ({summary['steps']})"
    assert any(each.startswith(warning) for each in summary["warnings"])
    assert warning in (finished_run.path / "report.md").read_text()
