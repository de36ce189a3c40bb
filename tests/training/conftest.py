"""A tiny target that always knows the next token, and shards of features and text in which n is
followed by 3n + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.artifacts.generated_rows import GENERATED
from pipeline.artifacts.state_format import StateFormat
from pipeline.config import BackboneConfig, TrainConfig
from pipeline.conversations.spans import Span, feature_positions
from pipeline.heads.kinds import head_kind
from pipeline.storage.shards import ShardTask, ShardWriter
from pipeline.targets.spec import TargetSpec
from pipeline.training.methods import method_of
from pipeline.training.task import TrainSpec
from pipeline.training.text_batches import Text, read_texts

V, D, FINGERPRINT, TEXTS_FINGERPRINT, ROWS_FINGERPRINT = 40, 32, "f" * 64, "9" * 64, "e" * 64
STATES = torch.from_numpy(
    np.random.default_rng(7).normal(size=(V, D))
).float()  # that say which token is next


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> TargetSpec:
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=False))
    model.lm_head.weight.data = 0.3 * STATES
    model.save_pretrained(directory)
    return TargetSpec(str(directory))


def feature_row(name: str, split: str, rng: np.random.Generator) -> dict[str, Any]:
    """A conversation of one to three spans in which one token follows from another, with a state
    for each.
    """
    spans, ids = [], [0]
    for role in ("assistant", "user", "assistant")[: rng.integers(1, 4)]:
        start, length = len(ids) + int(rng.integers(1, 4)), int(rng.integers(1, 18))
        ids += rng.integers(0, V, start - len(ids)).tolist()
        for _ in range(length):
            ids.append((3 * ids[-1] + 1) % V)
        spans.append(Span(start, len(ids), role))
    positions = feature_positions(spans)
    hidden = STATES[torch.tensor(ids)[torch.from_numpy(positions).long() + 1]]
    return {
        "id": name,
        "parent_id": name.partition("#")[0],
        "split": split,
        "input_ids": ids,
        "spans": [vars(span) for span in spans],
        "positions": positions,
        "hidden": hidden.view(torch.uint8).numpy().tobytes(),
    }


def layer_states(ids: list[int]) -> torch.Tensor:
    """States [T, D] of a layer that says which token it has read."""
    return STATES.roll(1, 1)[torch.tensor(ids)]


def rows_of_shards(seed: int) -> list[list[dict[str, Any]]]:
    """The rows of two shards, fifteen each; every fifth is held out, two of one conversation."""
    rng, shards = np.random.default_rng(seed), []
    for index in range(2):
        rows = []
        for i in range(15):
            split = "calibrate" if i % 5 == 4 else "train"
            name = f"s:{index}-9#{i}" if i in (9, 14) else f"s:{index}-{i}"
            rows.append(feature_row(name, split, rng))
        shards.append(rows)
    return shards


def write_shards(directory, stage: str, fingerprint: str, writer_of, shards) -> tuple[Path, ...]:
    """Write shards in row groups of five rows each."""
    paths = []
    for index, rows in enumerate(shards):
        path = directory / f"{index:05d}.parquet"
        with writer_of(ShardTask(0, path, path.with_suffix(".jsonl"), fingerprint)) as writer:
            for start in range(0, len(rows), 5):
                writer.write(rows[start : start + 5])
            writer.commit(stage, None)
        paths.append(path)
    return tuple(paths)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> tuple[Path, ...]:
    """Shards of features, of three row groups each."""
    states = StateFormat(torch.float32, D)
    writer = partial(ShardWriter, schema=states.schema, footer=states.footer)
    directory = tmp_path_factory.mktemp("features")
    return write_shards(directory, "features", FINGERPRINT, writer, rows_of_shards(0))


@pytest.fixture(scope="session")
def row_shards(tmp_path_factory) -> tuple[Path, ...]:
    """Shards with the output of the target's only layer at every token of the rows of `shards`."""
    states = StateFormat(torch.float32, D, layers=(1,))
    shards = rows_of_shards(0)
    for row in chain(*shards):
        del row["positions"], row["hidden"]
        row["layer_1"] = layer_states(row["input_ids"]).view(torch.uint8).numpy().tobytes()
    writer = partial(ShardWriter, schema=states.schema, footer=states.footer)
    directory = tmp_path_factory.mktemp("row-features")
    return write_shards(directory, "row-features", ROWS_FINGERPRINT, writer, shards)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> tuple[Path, ...]:
    """Two shards of generated conversations."""
    shards = rows_of_shards(3)
    for row in chain(*shards):
        del row["positions"], row["hidden"]
        row.update(finish=[], messages=[])
    writer = partial(ShardWriter, schema=GENERATED)
    directory = tmp_path_factory.mktemp("texts")
    return write_shards(directory, "generate", TEXTS_FINGERPRINT, writer, shards)


def opened(texts: tuple[Path, ...], **changes: Any) -> dict[str, list[Text]]:
    """The conversations of `texts` by split."""
    settings = {
        "fingerprint": TEXTS_FINGERPRINT,
        "vocab_size": V,
        "roles": ("assistant",),
        "sequence_length": 64,
    }
    return read_texts(texts, **{**settings, **changes})


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Nest settings of `train`; `backbone_lr` and `backbone_loss` are the backbone's."""
    found: dict[str, Any] = {"medusa": {}, "backbone": {}}
    for key, value in settings.items():
        name = key.removeprefix("backbone_")
        if key in ("lm_head", "num_layers"):
            found["medusa"][key] = value
        elif name != key or (key in BackboneConfig.model_fields and key != "lr"):
            found["backbone"][name] = value
        else:
            found[key] = value
    return found


MakeSpec = Callable[..., TrainSpec]


@pytest.fixture
def make_spec(tmp_path, shards, row_shards, target) -> MakeSpec:
    """A training of a few steps in a directory of its own; keywords change its settings."""

    def make(
        name: str = "train", *, shards: tuple[Path, ...] = shards, **settings: Any
    ) -> TrainSpec:
        usual = {
            "heads": "medusa",
            "num_heads": 3,
            "epochs": 2,
            "batch_tokens": 40,
            "warmup_steps": 2,
            "lr": 1e-2,
            "checkpoint_every": 3,
        }
        usual |= {"soft_labels": 0.0}  # what most tests compare with is the paper's
        (tmp_path / name).mkdir(exist_ok=True)
        train = TrainConfig(**nested({**usual, **settings}))
        return TrainSpec(
            shards=shards,
            fingerprint=FINGERPRINT,
            row_shards=row_shards,
            row_fingerprint=ROWS_FINGERPRINT,
            settings=train,
            kind=head_kind(train.heads),
            phases=method_of(train).phases(train),
            target=target,
            hidden_size=D,
            vocab_size=V,
            seed=1,
            directory=str(tmp_path / name),
            device="cpu",
        )

    return make


@pytest.fixture
def make_tuning(make_spec, texts) -> MakeSpec:
    """A training of heads and backbone, of eight steps; keywords change its settings."""

    def make(name: str = "tuning", **settings: Any) -> TrainSpec:
        usual = {
            "method": "medusa-2",
            "epochs": 4,
            "schedule": "constant",
            "lambda_0": 0.2,
            "lora_rank": 4,
            "lora_alpha": 8,
            "sequence_length": 64,
            "batch_sequences": 6,
            "gradient_checkpointing": False,
        }
        spec = make_spec(name, **{**usual, **settings})
        return replace(spec, texts=texts, texts_fingerprint=TEXTS_FINGERPRINT)

    return make
