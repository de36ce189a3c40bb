"""Synthetic inputs of benchmarks: rows of the generate stage with random tokens, feature shards.

The measured speeds and sizes depend only on a row's length and on the share that the target wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts.feature_writer import FeatureWriter, WaitingMemory
from pipeline.artifacts.generated_rows import GENERATED, TokenRow
from pipeline.artifacts.state_format import StateFormat
from pipeline.config import TrainConfig
from pipeline.conversations.conversation import Role
from pipeline.conversations.spans import Span
from pipeline.heads.kinds import head_kind
from pipeline.storage.shards import ShardTask, ShardWriter
from pipeline.targets.spec import TargetSpec, model_config
from pipeline.training.methods import METHODS
from pipeline.training.task import TrainSpec

FINGERPRINT = "benchmark"
ROLES: tuple[Role, ...] = ("assistant",)  # heads learn from these
WRITTEN_SHARE = 0.75  # of a row's tokens are the target's, as in replayed chat seeds

Row = dict[str, Any]


def generated_row(
    name: str, turns: Sequence[tuple[int, int]], vocab_size: int, rng: np.random.Generator
) -> Row:
    """Return a generated row of random tokens; `turns` are pairs of counts (asked, answered)."""
    spans, end = [], 0
    for asked, answered in turns:
        spans.append(Span(end + asked, end + asked + answered, "assistant"))
        end += asked + answered
    return {
        "id": name,
        "parent_id": name,
        "split": "train",
        "input_ids": rng.integers(2, vocab_size, end).tolist(),
        "spans": [vars(span) for span in spans],
        "finish": ["stop"] * len(spans),
        "messages": [],
    }


def ragged_rows(
    num_rows: int, shortest: int, longest: int, vocab_size: int, seed: int = 0
) -> list[Row]:
    """Return generated rows of one to four turns and about `shortest` to `longest` random tokens.

    The target has written three quarters of the tokens.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        num_turns = int(rng.integers(1, 5))
        per_turn = max(8, int(rng.integers(shortest, longest + 1)) // num_turns)
        asked = round(per_turn * (1 - WRITTEN_SHARE))
        rows.append(
            generated_row(f"r:{index}", [(asked, per_turn - asked)] * num_turns, vocab_size, rng)
        )
    return rows


def equal_rows(
    num_rows: int, num_turns: int, per_turn: int, vocab_size: int, seed: int = 0
) -> list[Row]:
    """Return generated rows of `num_turns` turns, each of `per_turn` random tokens.

    The target has written three quarters of the tokens.
    """
    rng = np.random.default_rng(seed)
    asked = round(per_turn * (1 - WRITTEN_SHARE))
    turns = [(asked, per_turn - asked)] * num_turns
    return [generated_row(f"r:{index}", turns, vocab_size, rng) for index in range(num_rows)]


def write_features(
    path: Path,
    rows: Sequence[TokenRow],
    hidden: Iterable[Tensor],
    states: StateFormat,
    waiting: WaitingMemory | None = None,
) -> int:
    """Write a feature shard of rows and states [T, D]; return the number of positions.

    T is a row's number of tokens, D the hidden size.
    """
    task = ShardTask(0, path, path.with_suffix(".jsonl"), FINGERPRINT)
    with (
        ShardWriter(task, states.schema, footer=states.footer) as writer,
        FeatureWriter(writer, rows, states, waiting or WaitingMemory()) as features,
    ):
        for index, hidden_TD in enumerate(hidden):
            features.put(index, hidden_TD)
        positions = features.finish()
        writer.commit("features", None)
        return positions


def features_tasks(directory: Path, shards: Iterable[Sequence[Row]]) -> list[ShardTask]:
    """Write shards of generated rows; return a task of the features stage for each."""
    tasks = []
    for index, rows in enumerate(shards):
        source, made = (
            directory / "generate" / f"{index:05d}.parquet",
            directory / "features" / f"{index:05d}.parquet",
        )
        task = ShardTask(index, source, source.with_suffix(".jsonl"), "rows")
        with ShardWriter(task, GENERATED) as writer:
            writer.write(rows)
            content = writer.commit("generate", None).content_sha256
        quarantine = made.with_suffix(".jsonl")
        tasks.append(ShardTask(index, made, quarantine, FINGERPRINT, source, content))
    return tasks


def train_spec(
    target: TargetSpec,
    settings: TrainConfig,
    directory: Path,
    tasks: Sequence[ShardTask],
    device: torch.device,
) -> TrainSpec:
    """Return the spec of a training of heads from the shards of `features_tasks`."""
    text = model_config(target).get_text_config()
    return TrainSpec(
        shards=tuple(task.shard for task in tasks),
        fingerprint=FINGERPRINT,
        settings=settings,
        kind=head_kind(settings.heads),
        phases=METHODS[settings.method].phases(settings),
        target=target,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        seed=0,
        directory=str(directory),
        device="cuda" if device.type == "cuda" else "cpu",
        texts=tuple(task.source for task in tasks),
        texts_fingerprint="rows",
    )
