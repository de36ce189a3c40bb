"""What of the settings a training depends on: no key that its method never reads, and none that says how it is run."""

from __future__ import annotations

import pytest
from rich.console import Console

from pipeline.run.context import Context
from pipeline.stages import train
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.run_directory import RunDirectory

MEDUSA_2 = {"train__method": "medusa-2"}
TWO_STAGE = MEDUSA_2 | {"train__recipe": "two-stage"}


@pytest.fixture
def identity(make_config, tmp_path):
    def of(**changes) -> str:
        config = make_config(tmp_path, **changes)
        return fingerprint(train.identity(Context(config, RunDirectory.create(config), Console(quiet=True))))

    return of


def test_medusa1_is_named_as_it_was_before_there_was_another_method(make_config, tmp_path):
    config = make_config(tmp_path)
    settings = train.identity(Context(config, RunDirectory.create(config), Console(quiet=True)))["settings"]
    common = {"method", "num_heads", "num_layers", "lm_head", "decay", "roles", "lr", "epochs", "batch_tokens"}
    assert set(settings) == common | {"warmup_steps", "optimizer", "weight_decay", "max_grad_norm", "precision"}


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ({}, "lambda_0", 0.5),
        ({}, "lora_rank", 3),
        ({}, "sequence_length", 100),
        ({}, "recipe", "two-stage"),
        (MEDUSA_2, "batch_tokens", 99),
        (MEDUSA_2, "max_kl", 0.5),
        (MEDUSA_2, "micro_batch", 4),
        (MEDUSA_2, "gradient_checkpointing", False),
        (MEDUSA_2, "shard_backbone", True),
        (MEDUSA_2, "quantization", "none"),
        (MEDUSA_2 | {"target__quantization": "4bit"}, "quantization", "4bit"),
        ({}, "quantization", "4bit"),
        (TWO_STAGE, "checkpoint_every", 7),
    ],
)
def test_what_makes_no_difference_leaves_a_training_s_name_alone(identity, method, key, value):
    assert identity(**method, **{f"train__{key}": value}) == identity(**method)


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ({}, "method", "medusa-2"),
        ({}, "batch_tokens", 99),
        (MEDUSA_2, "recipe", "two-stage"),
        (MEDUSA_2, "backbone_loss", "ce"),
        (MEDUSA_2, "backbone_lr", 1e-5),
        (MEDUSA_2, "lora_dropout", 0.1),
        (MEDUSA_2, "batch_sequences", 3),
        (MEDUSA_2, "quantization", "4bit"),
        (MEDUSA_2 | {"target__quantization": "4bit"}, "quantization", "none"),
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
