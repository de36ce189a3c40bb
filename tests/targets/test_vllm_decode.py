"""Decoding in vLLM's processes, which are stood in for here."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.targets import vllm_decode
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_decode import DecodeTask, VLLMTexts, decode_in_vllm


def task(name: str, gpus: int, optional: bool = False) -> DecodeTask:
    return DecodeTask(TargetSpec("model"), [[1]], 9, gpus=gpus, name=name, optional=optional)


ON_CPU = [["plain", "heads"], ["ngram"]]
ON_GPU = [["plain"], ["heads"], ["ngram"]]


@pytest.mark.parametrize(("gpus", "processes"), [(0, ON_CPU), (1, ON_GPU)])
def test_an_optional_method_that_fails_ends_no_other(monkeypatch, gpus, processes):
    def in_own_process(function, tasks, on_report):
        asked.append([each.name for each in tasks])
        if "ngram" in asked[-1]:
            raise ConfigError("No.", "", "")
        return [VLLMTexts([[1]]) for _ in tasks]

    asked: list[list[str]] = []
    monkeypatch.setattr(vllm_decode, "in_own_process", in_own_process)
    plain, heads, ngram = decode_in_vllm(
        [task("plain", gpus), task("heads", gpus), task("ngram", gpus, optional=True)]
    )
    assert asked == processes and plain.token_ids == heads.token_ids == [[1]]
    assert ngram.failed and not ngram.token_ids
    with pytest.raises(ConfigError):
        decode_in_vllm([task("ngram", gpus)])
