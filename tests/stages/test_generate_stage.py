"""A generated row is what was sampled, and the same whichever rows stand beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.config import GenerateConfig
from pipeline.errors import DataError
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import latest, quarantined, read_lines, stored, write_lines


@pytest.fixture
def generated(again):
    """`generated(**settings)`: the finished generate stage."""

    def make(**settings):
        return latest(again(until="generate", **settings), "generate")

    return make


def test_held_out_rows_are_greedy_and_training_rows_sampled(finished_run, generated):
    first = {row["id"]: row for row in stored(finished_run.latest("generate"))}
    others = {row["id"]: row for row in stored(generated(run__seed=1))}
    for name, row in first.items():
        other = others.get(name)
        is_same = other is not None and row["input_ids"] == other["input_ids"]
        assert is_same == (row["split"] != "train")


def test_each_training_prompt_has_its_samples_in_its_shard(finished_run, generated):
    seeds, one = finished_run.latest("seeds"), finished_run.latest("generate")
    several = generated(generate__samples=3, generate__greedy_first=False)
    rows = {row["id"]: row for row in stored(several)}
    for index in seeds.receipts():
        expected = set()
        for row in read_rows(seeds.shard_path(index)):
            later = ("~2", "~3") if row["split"] == "train" else ()
            expected |= {row["id"], *(row["id"] + suffix for suffix in later)}
        kept = {row["id"] for row in read_rows(several.shard_path(index))}
        refused = [line["id"] for line in read_lines(several.quarantine_path(index))]
        assert sorted([*kept, *refused]) == sorted(expected)
    firsts = {row["id"]: row["input_ids"] for row in stored(one)}
    assert {name: rows[name]["input_ids"] for name in firsts} == firsts
    assert len(rows) > 2 * len(firsts)


def test_the_first_of_several_samples_is_greedy(generated):
    greedy = {row["id"]: row["input_ids"] for row in stored(generated(generate__temperature=0))}
    several = {row["id"]: row["input_ids"] for row in stored(generated(generate__samples=2))}
    assert {name: several[name] for name in greedy} == greedy and len(several) > len(greedy)


def test_equal_samples_are_duplicates_that_no_limit_counts(generated):
    """So cold a target writes the same text each time."""
    stage = generated(
        generate__samples=3, generate__temperature=1e-6, limits__max_quarantine_fraction=0.1
    )
    train = [row["id"] for row in stored(stage) if row["split"] == "train"]
    later = [name + suffix for name in train for suffix in ("~2", "~3")]
    found = [line["id"] for line in quarantined(stage) if line["reason"] == "duplicate"]
    assert len(later) > 40 and sorted(found) == sorted(later)


@pytest.mark.parametrize(
    ("settings", "prompts", "samples"),
    [
        ({}, 99, 8),
        ({}, 100, 4),
        ({}, 1_999, 4),
        ({}, 2_000, 1),
        ({"temperature": 0}, 60, 1),
        ({"mode": "passthrough"}, 60, 1),
    ],
)
def test_auto_takes_several_samples_of_few_prompts(settings, prompts, samples):
    assert GenerateConfig(**settings).num_samples(prompts) == samples


def test_spans_are_what_was_sampled(finished_run):
    """An ended answer holds its end of turn."""
    stops, finishes = {1}, set()
    for row in stored(finished_run.latest("generate")):
        roles = [message["role"] for message in row["messages"]]
        assert len(row["finish"]) == len(row["spans"]) == roles.count("assistant")
        for span, finish in zip(row["spans"], row["finish"], strict=True):
            answer = row["input_ids"][span["start"] : span["end"]]
            assert (answer[-1] in stops) == (finish == "stop")
            assert not stops & set(answer[:-1]) and len(answer) <= 16
            finishes.add(finish)
    assert finishes == {"stop", "length"}


def test_passthrough_keeps_the_seed_s_own_answers(finished_run, generated):
    messages = {row["id"]: row["messages"] for row in stored(finished_run.latest("seeds"))}
    rows = stored(generated(generate__mode="passthrough", generate__engine="vllm"))
    assert {row["id"]: row["messages"] for row in rows} == messages


def test_answers_marked_not_to_learn_are_counted(generated, tmp_path):
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    marked = [turns[0], turns[1] | {"weight": 0}, turns[0], turns[1] | {"weight": 1}]
    rows = []
    for n in range(40):
        rows.append({"messages": [turns[0] | {"content": f"What is {n}?"}, *marked[1:]]})
    source = {"path": write_lines(tmp_path / "marked.jsonl", *rows)}
    mode = {"generate__mode": "passthrough", "generate__engine": "vllm"}
    stage = generated(seeds__sources=[source], **mode)
    assert stage.summary["unlearned_answers"] == 40
    assert all(len(row["spans"]) == 1 for row in stored(stage))


def test_self_talk_writes_both_roles(generated):
    turns = ["assistant", "user", "assistant", "user", "assistant"]
    longest = 0
    for row in stored(generated(generate__mode="self-talk", generate__rounds=3)):
        roles = [span["role"] for span in row["spans"]]
        assert roles == turns[: len(roles)]
        longest = max(longest, len(roles))
    assert longest == len(turns)


def talks(path: Path, rows: list[list[str]]) -> dict:
    source = {"path": write_lines(path, *({"data": row} for row in rows))}
    settings = {"seeds__sources": [source], "seeds__holdout": 0.5}
    return settings | {"generate__mode": "passthrough", "generate__engine": "vllm"}


def test_a_split_that_is_all_quarantined_is_refused(again, generated, tmp_path):
    """Right after generate, not after training."""
    file, rows = tmp_path / "seeds.jsonl", [[f"What is {n}?", "That."] for n in range(40)]
    settings = talks(file, rows) | {"limits__max_quarantine_fraction": 0.5}
    run = again(until="seeds", **settings)
    for row in stored(run.latest("seeds")):
        if row["split"] == "check":
            del rows[int(row["id"].removeprefix("seeds:"))][1]  # no answer to pass through
    talks(file, rows)
    with pytest.raises(DataError, match=r"train 20, calibrate 10, check 0"):
        generated(**settings)


def test_the_date_of_a_chat_template_is_the_configuration_s(generated, tmp_path, tiny_target):
    """The date is part of the fingerprint where the template asks for it."""
    dated = Path(shutil.copytree(tiny_target, tmp_path / "dated"))
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }} " + template.read_text())
    settings = talks(tmp_path / "seeds.jsonl", [[f"What is {n}?", "That."] for n in range(40)])

    def made(model: Path, date: str) -> tuple[str, str]:
        stage = generated(**settings, target__model=str(model), target__date=date)
        text = load_tokenizer(TargetSpec(str(model))).decode(stored(stage)[0]["input_ids"])
        return stage.fingerprint, text

    first, other = made(dated, "2024-02-29"), made(dated, "2026-11-22")
    assert first[0] != other[0]
    assert first[1].startswith("2024-02-29 ") and other[1].startswith("2026-11-22 ")
    assert made(tiny_target, "2024-02-29") == made(tiny_target, "2026-11-22")


def test_special_tokens_in_seeds_are_escaped_or_kept(generated, tmp_path):
    """8 of 80 questions hold the token that ends every turn, whose id is 1."""
    rows = [[f"What is {n}{'</s>' * (n % 10 == 0)}?", "That."] for n in range(80)]
    settings = talks(tmp_path / "seeds.jsonl", rows)
    for policy, ends in (("escape", 2), ("keep", 3)):
        stage = generated(**settings, seeds__special_tokens=policy)
        ids = [row["input_ids"] for row in stored(stage)]
        assert max(row.count(1) for row in ids) == ends and len(ids) == 80
