"""Accuracies are those of held-out rows, calculated here once more; the tree is searched from them,
or the user's.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from pipeline.errors import ConfigError, DataError
from pipeline.flow import run_flow
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec
from tests.flows.tiny import stages_run


def run_again(config, until="calibrate"):
    return run_flow(config, until=until, executor="inline", console=Console(quiet=True))


def guesses(heads: dict[str, np.ndarray], head: int, hidden_ND: np.ndarray) -> np.ndarray:
    """A head's tokens from likeliest to least, by the paper's formula in numpy: x + SiLU(W1 x +
    b1), then W2.
    """
    z_ND = hidden_ND @ heads[f"{head}.0.linear.weight"].T + heads[f"{head}.0.linear.bias"]
    logits_NV = (hidden_ND + z_ND / (1 + np.exp(-z_ND))) @ heads[f"{head}.1.weight"].T
    return np.argsort(-logits_NV, axis=1, kind="stable")


def rank_counts(run, split: str, num_heads: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """How often each head's i-th guess is right over a split's rows, and of how many labels."""
    heads = load_file(run.latest("train").path / "heads.safetensors")
    right_KR, labels_K = np.zeros((num_heads, 300)), np.zeros(num_heads, int)
    for path in run.latest("features").shards():
        for row in read_rows(path):
            if row["split"] != split:
                continue
            hidden_ND = np.frombuffer(row["hidden"], np.float32).reshape(-1, 64)
            at = {position: number for number, position in enumerate(row["positions"])}
            for head in range(num_heads):
                order_NV = guesses(heads, head, hidden_ND)
                for span in row["spans"]:
                    # t+1 and t+2+k lie in [start, end)
                    for t in range(span["start"] - 1, span["end"] - 2 - head):
                        rank = int(
                            np.flatnonzero(order_NV[at[t]] == row["input_ids"][t + 2 + head])[0]
                        )
                        right_KR[head, rank] += 1
                        labels_K[head] += 1
    return right_KR, labels_K


def test_accuracies_are_those_of_the_calibrate_split_and_no_other(finished_run):
    right_KR, labels_K = rank_counts(finished_run, "calibrate")
    tree = json.loads((finished_run.path / "latest/calibrate/tree.json").read_text())
    np.testing.assert_allclose(
        tree["accuracies"], (right_KR / labels_K[:, None])[:, :10], atol=1e-9
    )
    heads = finished_run.latest("calibrate").summary["heads"]
    for head, figures in enumerate(heads):
        for top in (1, 5):
            assert figures[f"top{top}"] == pytest.approx(
                right_KR[head, :top].sum() / labels_K[head], abs=1e-4
            )
    train_KR, train_K = rank_counts(finished_run, "train")
    assert train_KR[0, 0] / train_K[0] != pytest.approx(tree["accuracies"][0][0], abs=1e-3)


def learned_dialogues(run) -> list[list[tuple]]:
    """The spans of every held-out conversation, with all heads' guesses at each state."""
    heads, dialogues = load_file(run.latest("train").path / "heads.safetensors"), []
    for path in run.latest("features").shards():
        for row in read_rows(path):
            hidden_ND = np.frombuffer(row["hidden"], np.float32).reshape(-1, 64)
            at = {position: number for number, position in enumerate(row["positions"])}
            order_KNV = (
                [guesses(heads, head, hidden_ND) for head in range(3)]
                if row["split"] == "calibrate"
                else []
            )
            learned = [
                span for span in row["spans"] if order_KNV and span["end"] - span["start"] > 1
            ]
            if learned:
                dialogues.append(
                    [(s["start"], s["end"], row["input_ids"], at, order_KNV) for s in learned]
                )
    return dialogues


def is_right(span: tuple, t: int, path) -> bool:
    _, end, ids, at, order_KNV = span
    inside = t + 1 + len(path) < end
    return inside and all(
        order_KNV[k][at[t], rank] == ids[t + 2 + k] for k, rank in enumerate(path)
    )


def walk(dialogues: list[list[tuple]], choices: list[list[int]]) -> tuple[list[int], list[int]]:
    """Each conversation's tokens and steps, stepping through it as decoding does."""
    counts = []
    for dialogue in dialogues:
        tokens = steps = 0
        for span in dialogue:
            start, end, *_ = span
            t = start - 1  # the state that the root's token, at t+1, was read from
            while t + 2 < end:
                kept = max((len(path) for path in choices if is_right(span, t, path)), default=0)
                tokens, steps, t = tokens + min(kept + 1, end - t - 2), steps + 1, t + kept + 1
        counts.append((tokens, steps))
    return tuple(map(list, zip(*counts, strict=True)))


def walked_rate(dialogues: list[list[tuple]], choices: list[list[int]]) -> float:
    """Tokens per step over all conversations."""
    tokens, steps = walk(dialogues, choices)
    return sum(tokens) / sum(steps)


def test_each_half_of_the_conversations_is_walked_with_the_tree_of_the_other_and_steps_add_up(
    finished_run,
):
    tree = json.loads((finished_run.path / "latest/calibrate/tree.json").read_text())
    summary = finished_run.latest("calibrate").summary["tree"]
    choices = [tuple(path) for path in tree["choices"]]
    assert len(choices) == len(set(choices)) == 8 == summary["nodes"]
    assert all(len(path) == 1 or path[:-1] in choices for path in choices)
    dialogues = learned_dialogues(finished_run)
    walked = [
        walk(dialogues[1 - half :: 2], tree["judged"][half]) for half in (0, 1)
    ]  # tokens and steps of each
    tokens, steps = (
        sum(sum(counts) for counts in zip(*(half[i] for half in walked), strict=True))
        for i in (0, 1)
    )
    expected = tree["expected_acceleration_rate"]
    assert expected == pytest.approx(tokens / steps) == pytest.approx(1 + sum(tree["node_shares"]))
    assert 1 + sum(summary["tokens_by_depth"]) == pytest.approx(expected, abs=1e-3)
    assert tree["searches"].keys() == {"product", "joint"}
    assert tree["searches"][summary["source"]] == max(tree["searches"].values()) == expected
    assert summary["expected_standard_error"] > 0


def test_the_chain_of_every_length_is_foretold_from_all_held_out_text(finished_run):
    summary, dialogues = finished_run.latest("calibrate").summary, learned_dialogues(finished_run)
    chain = summary["tree"]["chain"]
    for tokens, row in enumerate(chain, start=1):
        choices = [[0] * depth for depth in range(1, tokens + 1)]
        assert row["draft_tokens"] == tokens
        assert row["expected_acceleration_rate"] == pytest.approx(
            walked_rate(dialogues, choices), abs=1e-4
        )
    assert len(chain) == summary["tree"]["num_speculative_tokens"] == 3, (
        "nothing was timed: all the heads"
    )
    assert summary["conversations"] == len(dialogues)


def test_the_chain_has_the_fastest_or_the_given_length(
    copied_run, make_config, tmp_path, monkeypatch
):
    def overheads(_, __, sizes, *more):
        return {
            size: 50.0 if size == 3 else 2.0 for size in sizes
        }  # a third token costs more than it brings

    monkeypatch.setattr("pipeline.evaluation.overhead.overhead_curve", overheads)
    auto = {"calibrate__nodes": "auto", "check__engines": ["native", "vllm"]}
    tree = run_again(make_config(tmp_path, **auto)).latest("calibrate").summary["tree"]
    assert [row["overhead"] for row in tree["chain"]] == [2, 2, 50]
    assert tree["num_speculative_tokens"] in (1, 2)
    tree = (
        run_again(make_config(tmp_path, **auto, calibrate__draft_tokens=3))
        .latest("calibrate")
        .summary["tree"]
    )
    assert tree["num_speculative_tokens"] == 3
    run = run_again(make_config(tmp_path, calibrate__draft_tokens=2), until="export")
    config = json.loads((run.path / "latest/export/config.json").read_text())
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 2
    with pytest.raises(ConfigError, match=r"cannot draft 4 tokens.*calibrate\.draft_tokens"):
        run_again(make_config(tmp_path, calibrate__draft_tokens=4))


def test_the_tree_that_is_used_is_searched_on_all_held_out_text(finished_run):
    tree = json.loads((finished_run.path / "latest/calibrate/tree.json").read_text())
    source = finished_run.latest("calibrate").summary["tree"]["source"]
    spans = [span for dialogue in learned_dialogues(finished_run) for span in dialogue]
    states = [(span, t) for span in spans for t in range(span[0] - 1, span[1] - 2)]

    def score(path) -> float:
        if source == "product":
            return math.prod(tree["accuracies"][depth][rank] for depth, rank in enumerate(path))
        return sum(is_right(span, t, path) for span, t in states) / len(states)

    chosen = {tuple(path) for path in tree["choices"]}
    children = {
        (*path, rank) for path in chosen | {()} if len(path) < 3 for rank in range(10)
    } - chosen
    assert min(map(score, chosen)) >= max(map(score, children)) - 1e-12


@pytest.mark.slow
def test_auto_measures_what_trees_cost_here_and_takes_the_size_that_promises_the_highest_speedup(
    copied_run, make_config, tmp_path, monkeypatch
):
    run = run_again(make_config(tmp_path, calibrate__nodes="auto"))
    tree = run.latest("calibrate").summary["tree"]
    sizes = [size["nodes"] for size in tree["sizes"]]  # as far as a tree can pay here
    assert sizes and sizes == [1, 3, 7, 15, 31, 63, 127, 255][: len(sizes)], (
        "with the root, powers of two"
    )
    assert tree["nodes"] in sizes, "what is used has been measured"
    for size in tree["sizes"]:
        assert size["overhead"] > 0 and size["expected_acceleration_rate"] >= 1
        ratio = size["expected_acceleration_rate"] / size["overhead"]
        assert size["expected_speedup"] == pytest.approx(ratio, rel=1e-3)

    def costly(model, heads, trees, prompts, context, progress):
        asked[:] = prompts
        return {size: 1.0 + 100 * (size > 3) for size in trees}

    asked: list[list[int]] = []

    monkeypatch.setattr("pipeline.evaluation.overhead.overhead_curve", costly)
    run = run_flow(
        make_config(tmp_path, calibrate__nodes="auto"),
        until="calibrate",
        executor="inline",
        console=Console(quiet=True),
        fresh="calibrate",
    )
    assert run.latest("calibrate").summary["tree"]["nodes"] <= 3
    rows = [
        row
        for path in run.latest("generate").shards()
        for row in read_rows(path)
        if row["split"] == "calibrate"
    ]
    begun = {tuple(row["input_ids"][: span["start"]]) for row in rows for span in row["spans"]}
    assert 1 < len(asked) == len({tuple(ids) for ids in asked}) and begun >= {
        tuple(ids) for ids in asked
    }


def test_a_tree_of_the_user_s_own_is_taken_as_it_is(copied_run, make_config, tmp_path):
    choices = [[0], [1], [0, 0], [0, 0, 2]]
    (tmp_path / "choices.json").write_text(json.dumps(choices))
    run = run_again(
        make_config(tmp_path, calibrate__choices=str(tmp_path / "choices.json")), until="check"
    )
    assert stages_run(run) == ["calibrate", "export", "check"]
    assert json.loads((run.path / "latest/export/medusa_choices.json").read_text()) == choices
    tree = run.latest("calibrate").summary["tree"]
    assert (tree["nodes"], tree["depth"], tree["source"]) == (4, 3, "calibrate.choices")
    assert tree["expected_acceleration_rate"] == pytest.approx(
        walked_rate(learned_dialogues(run), choices), abs=1e-4
    )
    run = run_again(make_config(tmp_path, calibrate__choices=choices), until="check")
    assert stages_run(run) == []  # the same tree, given as a list


def test_another_tree_in_the_same_file_is_noticed(copied_run, make_config, tmp_path):
    file = tmp_path / "choices.json"
    config = make_config(tmp_path, calibrate__choices=str(file))
    for choices in ([[0]], [[0], [1]]):
        file.write_text(json.dumps(choices))
        assert run_again(config).latest("calibrate").summary["tree"]["nodes"] == len(choices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("[[0], [0", "cannot be read"),
        ('{"a": 1}', "not a list"),
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "heads"),
        ("[[0], [1, 0]]", "parent|prefix"),
        ('[["a"]]', "rank|path"),
        ("[[99]]", "guess|rank|top"),
        ("[]", "no nodes"),
    ],
)
def test_a_tree_that_cannot_be_used_is_told_before_anything_is_started(
    make_config, tmp_path, text, says
):
    if text is not None:
        (tmp_path / "choices.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"(?i)({says})") as caught:
        run_again(make_config(tmp_path, calibrate__choices=str(tmp_path / "choices.json")))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_tree_is_taken_by_its_name_cut_where_the_heads_end_and_an_unknown_name_has_a_near_one(
    copied_run, make_config, tmp_path
):
    run = run_again(make_config(tmp_path, calibrate__choices="vicuna-7b-stage2"))
    tree = run.latest("calibrate").summary["tree"]
    assert (tree["nodes"], tree["depth"]) == (10 + 23 + 23, 3)  # of 4 levels, three heads
    with pytest.raises(ConfigError, match="Did you mean the tree vicuna-7b-stage2"):
        run_again(make_config(tmp_path, calibrate__choices="vicuna_7b_stage2"))


@pytest.mark.slow
def test_a_file_of_its_own_is_answered_by_the_target_and_judges_in_place_of_held_out_rows(
    copied_run, make_config, tmp_path, tiny_target
):
    from pipeline.targets.loading import load_causal_lm

    file = tmp_path / "questions.jsonl"
    questions = [
        [f"why {word}?", "how does the river run?"] for word in ("moon", "stone", "cat", "dog")
    ]
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    held_out = copied_run.latest("calibrate").summary
    run = run_again(make_config(tmp_path, calibrate__data=str(file)), until="check")
    assert stages_run(run) == ["calibrate", "export", "check"], "nothing is trained again"
    found = run.latest("calibrate").summary
    assert found["conversations"] == 4 and found["tree"]["text"] == "calibrate.data"
    assert found["heads"] != held_out["heads"] and run.latest(
        "export"
    ).fingerprint != copied_run.latest("export")
    # Each answer's tokens but the first are labels of head 0: greedy answers, counted here by
    # transformers' generate.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = load_causal_lm(TargetSpec(str(tiny_target)), "cpu", 1)
    labels = 0
    for turns in questions:
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            asked = tokenizer(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            )
            ids = torch.tensor([asked["input_ids"]])
            (written,) = model.generate(ids, do_sample=False, max_new_tokens=16)[
                :, ids.shape[1] :
            ].tolist()
            labels += len(written) - 1
            messages.append(
                {
                    "role": "assistant",
                    "content": tokenizer.decode(written, skip_special_tokens=True),
                }
            )
    assert found["positions"] == pytest.approx(labels, rel=0.2), (
        "up to texts that tokenize otherwise"
    )
    assert (
        stages_run(run_again(make_config(tmp_path, calibrate__data=str(file)), until="check")) == []
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"turns": ["moon " * 400]}) + "\n", "No row of the file"),
        ("[]", "no conversation"),
    ],
)
def test_a_file_without_usable_rows_is_named(copied_run, make_config, tmp_path, text, says):
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=f"(?i){says}") as caught:
        run_again(make_config(tmp_path, calibrate__data=str(file)))
    assert (
        caught.value.exit_code == 3
        and "\n" not in str(caught.value)
        and "questions.jsonl" in str(caught.value)
    )
    with pytest.raises(ConfigError, match=r"There is no file .*calibrate\.data"):
        run_again(make_config(tmp_path, calibrate__data=str(tmp_path / "absent.jsonl")))


def test_answers_too_short_for_the_last_head_are_named(make_config, tmp_path, monkeypatch):
    """All of them end early; here they are cut, which is refused before a run where nobody looks
    away.
    """
    monkeypatch.setattr("pipeline.run.checks.CHECKS", ())
    with pytest.raises(DataError, match="Head 2 has nothing to be measured on"):
        run_again(make_config(tmp_path, generate__max_new_tokens=3))
