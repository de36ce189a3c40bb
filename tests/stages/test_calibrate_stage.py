"""The calibrate stage, whose accuracies and rates are calculated here once more."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from pipeline.artifacts.json_form import from_json
from pipeline.artifacts.tree_file import CalibrateResult, read_calibration
from pipeline.errors import ConfigError
from pipeline.flow import run_flow
from tests.flows.tiny import stages_run, stored


@pytest.fixture
def run_again(make_config, tmp_path):
    def run(until="calibrate", fresh=None, **changes):
        config, console = make_config(tmp_path, **changes), Console(quiet=True)
        return run_flow(config, until=until, executor="inline", console=console, fresh=fresh)

    return run


def result_of(run) -> CalibrateResult:
    return from_json(CalibrateResult, run.latest("calibrate").summary)


class Span:
    """A target-written span [start, end), and each head's guesses at the states before it."""

    def __init__(self, row: dict, span: dict, order_KNV: list[np.ndarray]):
        self.start, self.end, self.ids = span["start"], span["end"], row["input_ids"]
        self.order_KNV = order_KNV
        self.at = {position: number for number, position in enumerate(row["positions"])}

    def rank(self, head: int, t: int) -> int | None:
        """The rank of the token at t+2+k, None where that is beyond the span."""
        if t + 2 + head >= self.end:
            return None
        order_V = self.order_KNV[head][self.at[t]]
        return int(np.flatnonzero(order_V == self.ids[t + 2 + head])[0])

    def is_right(self, t: int, path) -> bool:
        return all(self.rank(head, t) == rank for head, rank in enumerate(path))


@functools.cache
def dialogues(run, split: str = "calibrate") -> list[list[Span]]:
    """The spans of every conversation of a split that has labels.

    A head's guesses are sorted by the paper's formula in numpy: x + SiLU(W1 x + b1), then W2.
    """
    heads = load_file(run.latest("train").path / "heads.safetensors")
    found = []
    for row in stored(run.latest("features")):
        if row["split"] != split:
            continue
        hidden_ND, order_KNV = np.frombuffer(row["hidden"], np.float32).reshape(-1, 64), []
        for head in range(3):
            weight, bias = heads[f"{head}.0.linear.weight"], heads[f"{head}.0.linear.bias"]
            z_ND = hidden_ND @ weight.T + bias
            logits_NV = (hidden_ND + z_ND / (1 + np.exp(-z_ND))) @ heads[f"{head}.1.weight"].T
            order_KNV.append(np.argsort(-logits_NV, axis=1, kind="stable"))
        spans = [span for span in row["spans"] if span["end"] - span["start"] > 1]
        if spans:
            found.append([Span(row, span, order_KNV) for span in spans])
    return found


def accuracies(run, split: str) -> np.ndarray:
    """The share of labels [K, R] that each head's i-th guess hits."""
    right_KR, labels_K = np.zeros((3, 300)), np.zeros(3)
    for dialogue in dialogues(run, split):
        for span in dialogue:
            for t in range(span.start - 1, span.end - 2):
                for head in range(3):
                    rank = span.rank(head, t)
                    if rank is not None:
                        right_KR[head, rank] += 1
                        labels_K[head] += 1
    return right_KR / labels_K[:, None]


def walk(spans: list[list[Span]], choices) -> tuple[int, int]:
    """Tokens and steps of decoding with a tree, had it written these conversations."""
    tokens = steps = 0
    for dialogue in spans:
        for span in dialogue:
            t = span.start - 1  # the state that the root's token, at t+1, was read from
            while t + 2 < span.end:
                kept = max((len(path) for path in choices if span.is_right(t, path)), default=0)
                tokens, steps = tokens + min(kept + 1, span.end - t - 2), steps + 1
                t += kept + 1
    return tokens, steps


def rate(run, choices) -> float:
    tokens, steps = walk(dialogues(run), choices)
    return pytest.approx(tokens / steps, abs=1e-4)


def test_accuracies_are_those_of_the_calibrate_split_and_no_other(finished_run):
    expected_KR = accuracies(finished_run, "calibrate")
    found = read_calibration(finished_run.path / "latest/calibrate").accuracies
    np.testing.assert_allclose(found, expected_KR[:, :10], atol=1e-9)
    for head, figures in enumerate(result_of(finished_run).heads):
        assert figures.top1 == pytest.approx(expected_KR[head, 0], abs=1e-4)
        assert figures.top5 == pytest.approx(expected_KR[head, :5].sum(), abs=1e-4)
    assert accuracies(finished_run, "train")[0, 0] != pytest.approx(found[0][0], abs=1e-3)


def test_expected_rate_is_that_of_unseen_halves(finished_run):
    tree = read_calibration(finished_run.path / "latest/calibrate")
    found, choices = result_of(finished_run).tree, tree.choices
    assert len(choices) == len(set(choices)) == 8 == found.nodes
    assert all(len(path) == 1 or path[:-1] in choices for path in choices)
    expected = tree.expected_acceleration_rate
    assert found.expected_acceleration_rate == pytest.approx(expected, abs=1e-4)
    assert found.expected_standard_error > 0


def test_chains_are_estimated_from_held_out_text(finished_run):
    result = result_of(finished_run)
    for tokens, row in enumerate(result.tree.chain, start=1):
        assert row.draft_tokens == tokens
        choices = [[0] * depth for depth in range(1, tokens + 1)]
        assert row.expected_acceleration_rate == rate(finished_run, choices)
    assert len(result.tree.chain) == result.tree.num_speculative_tokens == 3, "nothing was timed"
    assert result.conversations == len(dialogues(finished_run))


def test_the_chain_has_the_fastest_or_the_given_length(copied_run, run_again, monkeypatch):
    def overheads(model, heads, trees, *more):
        return {size: 50.0 if size == 3 else 2.0 for size in trees}  # a third token never pays

    monkeypatch.setattr("pipeline.evaluation.overhead.overhead_curve", overheads)
    auto = {"calibrate__nodes": "auto", "calibrate__draft_tokens": "auto"}
    auto["check__engines"] = ["native", "vllm"]
    tree = result_of(run_again(**auto)).tree
    assert [row.overhead for row in tree.chain] == [2, 2, 50]
    assert tree.num_speculative_tokens in (1, 2)
    given = run_again(**{**auto, "calibrate__draft_tokens": 3})
    assert result_of(given).tree.num_speculative_tokens == 3
    run = run_again("export", calibrate__draft_tokens=2)
    config = json.loads((run.path / "latest/export/config.json").read_text())
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 2
    with pytest.raises(ConfigError, match=r"calibrate\.draft_tokens"):
        run_again(calibrate__draft_tokens=4)


def test_the_user_s_own_tree_is_used_unchanged(copied_run, run_again, tmp_path):
    choices, file = [[0], [1], [0, 0], [0, 0, 2]], tmp_path / "choices.json"
    file.write_text(json.dumps(choices))
    run = run_again("check", calibrate__choices=str(file))
    assert stages_run(run) == ["calibrate", "export", "check"]
    assert json.loads((run.path / "latest/export/medusa_choices.json").read_text()) == choices
    tree = result_of(run).tree
    assert (tree.nodes, tree.depth) == (4, 3)
    assert tree.expected_acceleration_rate == rate(run, choices)
    run = run_again("check", calibrate__choices=choices)
    assert stages_run(run) == [], "the same tree, given as a list"
    file.write_text("[[0], [1]]")
    assert result_of(run_again(calibrate__choices=str(file))).tree.nodes == 2


@pytest.mark.parametrize(
    "text",
    [None, "[[0], [0", '{"nodes": 64}', "[[0], [1, 0]]"],
)
def test_a_tree_that_cannot_be_used_is_refused_first(run_again, tmp_path, text):
    if text is not None:
        (tmp_path / "choices.json").write_text(text)
    with pytest.raises(ConfigError, match=r"calibrate\.choices") as caught:
        run_again(calibrate__choices=str(tmp_path / "choices.json"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
