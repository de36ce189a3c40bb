"""The features worker computes the next shard during a commit; each shard's errors are its own."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeline.artifacts.generated_rows import GENERATED
from pipeline.config import FeaturesConfig
from pipeline.errors import EnvironmentFault
from pipeline.stages import features
from pipeline.storage.shards import ShardWriter, read_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec


class Card:
    """States that say which token they are of; which rows it has computed; and one that is too long
    for it.
    """

    dtype, hidden_size = torch.float32, 2

    def __init__(self):
        self.computed, self.too_long, self.all_of_two = [], None, threading.Event()
        self.under_way = 0

    def stream(self, rows):
        assert not self.under_way, (
            "an engine that goes on with the rows of a stream before mixes them up"
        )
        self.under_way += 1
        try:
            yield from self._states(rows)
        finally:
            self.under_way -= 1

    def _states(self, rows):
        for index, ids in reversed(list(enumerate(rows))):
            if ids[0] == self.too_long:
                raise EnvironmentFault("A row exceeds the GPU.")
            self.computed.append(ids[0])
            yield index, torch.tensor(ids)[:, None].repeat(1, 2).float()
            if len(self.computed) == 10:
                self.all_of_two.set()

    def close(self):
        pass


@pytest.fixture
def card(monkeypatch):
    made = Card()
    monkeypatch.setattr(features, "make_feature_engine", lambda *_: made)
    return made


@pytest.fixture
def tasks(tmp_path):
    """Two shards of five rows, numbered through in their first token."""
    upstream = StageDirectory(tmp_path, "generate", "g" * 64)
    span = {"start": 1, "end": 4, "role": "assistant"}
    usual = {"parent_id": "", "split": "train", "spans": [span], "finish": ["stop"], "messages": []}
    for index in range(2):
        with ShardWriter(upstream.task(index), GENERATED) as writer:
            numbers = range(5 * index, 5 * index + 5)
            writer.write([{"id": f"s:{n}", "input_ids": [n, 7, 8, 9], **usual} for n in numbers])
            writer.commit("generate", [f"s:{n}" for n in numbers])
    return StageDirectory(tmp_path, "features", "f" * 64).tasks(upstream, upstream.receipts())


def worker() -> features.Worker:
    return features.Worker(TargetSpec("unread"), FeaturesConfig(), gpus=0)


def expecting(work: features.Worker, task, upcoming=None):
    work.expect(upcoming)
    return work(task)


def test_the_next_shard_is_computed_during_a_commit(card, tasks, monkeypatch):
    work, real = worker(), ShardWriter.commit

    def slow(self, *arguments):
        if self.task.index == 0:
            assert card.all_of_two.wait(10), "nothing is computed while shard 0 is committed"
        return real(self, *arguments)

    monkeypatch.setattr(ShardWriter, "commit", slow)
    receipts = [expecting(work, tasks[0], tasks[1]), expecting(work, tasks[1])]
    work.close()
    assert card.computed == [4, 3, 2, 1, 0, 9, 8, 7, 6, 5], "each row once"
    assert [receipt.index for receipt in receipts] == [0, 1]
    for task, receipt in zip(tasks, receipts, strict=True):
        assert [row["id"] for row in read_rows(task.shard)] == [
            f"s:{n}" for n in range(5 * task.index, 5 * task.index + 5)
        ]
        assert receipt.stats == {"positions": 15.0, "tokens": 20.0}
        alone = worker()
        assert alone(task).content_sha256 == receipt.content_sha256
        alone.close()


@pytest.mark.parametrize(("fails", "survives"), [("commit", 1), ("compute", 0)])
def test_an_error_is_raised_for_its_own_shard(card, tasks, tmp_path, monkeypatch, fails, survives):
    work, real, under_way = worker(), ShardWriter.commit, threading.Event()

    def commit(self, *arguments):
        if self.task.index == 0:
            under_way.wait(0.2)  # the next shard has time to fail first
            if fails == "commit":
                raise EnvironmentFault("The disk is full.")
        return real(self, *arguments)

    monkeypatch.setattr(ShardWriter, "commit", commit)
    card.too_long = 6 if fails == "compute" else None
    outcomes = []
    for task, upcoming in ((tasks[0], tasks[1]), (tasks[1], None)):
        try:
            outcomes.append(expecting(work, task, upcoming).index)
        except EnvironmentFault as error:
            outcomes.append(str(error))
    work.close()
    said = {"commit": "The disk is full.", "compute": "A row exceeds the GPU."}[fails]
    assert outcomes[survives] == survives and said in outcomes[1 - survives]
    assert not list(tmp_path.rglob("*.tmp")), "what was begun leaves nothing"


def test_an_abandoned_shard_leaves_nothing(card, tasks, tmp_path):
    """Its stream ends at once: an engine would go on with its rows among those of the next."""
    work = worker()
    shard = features.ShardInProgress(work, tasks[0])
    assert shard.advance() and card.under_way == 1
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    shard.close()
    work.close()
    assert not card.under_way and not list(tmp_path.rglob("*.tmp"))
