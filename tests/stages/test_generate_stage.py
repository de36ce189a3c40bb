"""Conversations are held all at once, none waits for another, and a row is the same whoever stands
beside it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import run_again, stored


def rows_of(config):
    run = run_again(config, until="generate")
    return stored(run.latest("generate"))


def test_held_out_rows_are_greedy_and_training_rows_are_sampled_by_the_run_s_seed(
    finished_run, make_config, tmp_path
):
    first = {
        row["id"]: row
        for path in finished_run.latest("generate").shards()
        for row in read_rows(path)
    }
    other = {row["id"]: row for row in rows_of(make_config(tmp_path, run__seed=1))}

    def of(rows: dict[str, dict], *splits: str) -> dict[str, list[int]]:
        return {name: row["input_ids"] for name, row in rows.items() if row["split"] in splits}

    assert of(first, "calibrate", "check") == of(other, "calibrate", "check")
    assert not [
        name for name, ids in of(first, "train").items() if of(other, "train").get(name) == ids
    ]


def test_spans_are_what_was_sampled_and_an_ended_answer_holds_its_end_of_turn(
    finished_run, tiny_target
):
    stops = {1, *range(100, 108)}
    finishes = set()
    for path in finished_run.latest("generate").shards():
        for row in read_rows(path):
            assert (
                len(row["finish"])
                == len(row["spans"])
                == sum(m["role"] == "assistant" for m in row["messages"])
            )
            for span, finish in zip(row["spans"], row["finish"], strict=True):
                answer = row["input_ids"][span["start"] : span["end"]]
                assert (answer[-1] in stops) == (finish == "stop")
                assert not stops & set(answer[:-1]) and len(answer) <= 16
                finishes.add(finish)
    assert finishes == {"stop", "length"}


def test_passthrough_keeps_the_seed_s_own_answers(make_config, tmp_path):
    config = make_config(tmp_path, generate__mode="passthrough", generate__engine="vllm")
    seeds = run_again(config, until="seeds").latest("seeds")
    messages = {row["id"]: row["messages"] for path in seeds.shards() for row in read_rows(path)}
    rows = rows_of(config)
    assert len(rows) == 40
    assert all(row["messages"] == messages[row["id"]] for row in rows)


def test_self_talk_writes_both_roles(make_config, tmp_path):
    rows = rows_of(make_config(tmp_path, generate__mode="self-talk", generate__rounds=3))
    roles = [[span["role"] for span in row["spans"]] for row in rows]
    assert max(roles, key=len) == ["assistant", "user", "assistant", "user", "assistant"]
    assert all(
        spans == ["assistant", "user", "assistant", "user", "assistant"][: len(spans)]
        for spans in roles
    )


def test_a_template_that_rewrites_its_history_gives_one_row_per_turn_and_every_seed_is_owned(
    make_config, tmp_path, tiny_target
):
    """A mark stands before the last question alone."""
    forgetful = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ 'now ' if loop.last }}{{"
        " m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>'"
        " }}{% endif %}"
    )
    rows = rows_of(make_config(tmp_path, target__chat_template=forgetful))
    split = [row for row in rows if "#" in row["id"]]
    assert split and all(
        row["id"] == f"{row['parent_id']}#{row['id'].partition('#')[2]}" for row in split
    )
    assert all(len(row["spans"]) == 1 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


PASSTHROUGH = {
    "generate__mode": "passthrough",
    "generate__engine": "vllm",
    "seeds__holdout": 0.5,
}  # needs no engine


def talks(path: Path, rows: list[list[str]]) -> dict:
    path.write_text("".join(json.dumps({"data": row}) + "\n" for row in rows))
    return {"seeds__sources": [{"path": str(path)}], **PASSTHROUGH}


def test_held_out_rows_that_are_all_quarantined_are_missed_right_after_generate_and_by_name(
    make_config, tmp_path
):
    rows = [[f"What is {n}?", "That."] for n in range(40)]
    config = make_config(
        tmp_path, **talks(tmp_path / "seeds.jsonl", rows), limits__max_quarantine_fraction=0.5
    )
    seeds = run_again(config, until="seeds").latest("seeds")
    check = {
        row["id"] for path in seeds.shards() for row in read_rows(path) if row["split"] == "check"
    }
    for n in range(40):
        rows[n] = rows[n][: 1 if f"seeds:{n}" in check else 2]  # no answer to pass through
    talks(tmp_path / "seeds.jsonl", rows)
    with pytest.raises(
        DataError, match=r"left to check: train 20, calibrate 10, check 0; .*nothing-generated 10"
    ):
        run_again(config, until="generate")


def test_the_date_that_a_chat_template_asks_for_is_the_configuration_s_and_part_of_the_fingerprint(
    make_config, tmp_path, tiny_target
):
    dated = Path(shutil.copytree(tiny_target, tmp_path / "dated"))
    template = (dated / "chat_template.jinja").read_text()
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }} " + template)
    rows = [[f"What is {n}?", "That."] for n in range(40)]
    changes = talks(tmp_path / "seeds.jsonl", rows)

    def made(model: Path, date: str) -> tuple[str, list[str]]:
        config = make_config(tmp_path, **changes, target__model=str(model), target__date=date)
        run = run_again(config, until="generate")
        stage, tokenizer = run.latest("generate"), load_tokenizer(TargetSpec(str(model)))
        return stage.fingerprint, [
            tokenizer.decode(row["input_ids"]) for row in read_rows(stage.shard_path(0))
        ]

    (first, then), (other, later) = made(dated, "2024-02-29"), made(dated, "2026-11-22")
    assert (
        first != other and then[0].startswith("2024-02-29 ") and later[0].startswith("2026-11-22 ")
    )
    assert made(tiny_target, "2024-02-29") == made(tiny_target, "2026-11-22")


@pytest.mark.parametrize(
    ("policy", "counted", "ends"), [("escape", 8, 2), ("keep", 8, 3), ("quarantine", 8, 2)]
)
def test_special_tokens_in_seeds_are_escaped_kept_or_quarantined_and_counted(
    make_config, tmp_path, policy, counted, ends
):
    """8 of 80 questions hold the token that ends every turn, whose id is 1."""
    rows = [[f"What is {n}{'</s>' * (n % 10 == 0)}?", "That."] for n in range(80)]
    settings = talks(tmp_path / "seeds.jsonl", rows) | {"seeds__special_tokens": policy}
    run = run_again(make_config(tmp_path, **settings), until="generate")
    stage = run.latest("generate")
    kept = stored(stage)
    assert stage.summary.get("special_token_rows", 0) == counted
    assert stage.summary["reasons"] == ({"special-tokens": 8} if policy == "quarantine" else {})
    assert max(row["input_ids"].count(1) for row in kept) == ends
    assert len(kept) == 80 - stage.summary["quarantined"]


def test_a_new_rule_for_special_tokens_makes_new_text(make_config, tmp_path):
    rows = [[f"What is {n}{'</s>' * (n % 10 == 0)}?", "That."] for n in range(80)]
    settings = talks(tmp_path / "seeds.jsonl", rows)
    escaped = rows_of(make_config(tmp_path, **settings, seeds__special_tokens="escape"))
    kept = rows_of(make_config(tmp_path, **settings, seeds__special_tokens="keep"))
    assert max(row["input_ids"].count(1) for row in escaped) == 2
    assert max(row["input_ids"].count(1) for row in kept) == 3
