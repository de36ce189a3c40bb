"""Conversations are held all at once, none waits for another, and a row is the same whoever stands beside it."""

from __future__ import annotations

from rich.console import Console

from pipeline.flow import run_flow
from pipeline.storage.shards import read_rows


def rows_of(config):
    run = run_flow(config, until="generate", executor="inline", console=Console(quiet=True))
    return [row for path in run.latest("generate").shards() for row in read_rows(path)]


def test_held_out_rows_are_greedy_and_training_rows_are_sampled_by_the_run_s_seed(finished_run, make_config, tmp_path):
    first = {row["id"]: row for path in finished_run.latest("generate").shards() for row in read_rows(path)}
    other = {row["id"]: row for row in rows_of(make_config(tmp_path, run__seed=1))}

    def of(rows: dict[str, dict], *splits: str) -> dict[str, list[int]]:
        return {name: row["input_ids"] for name, row in rows.items() if row["split"] in splits}

    assert of(first, "calibrate", "check") == of(other, "calibrate", "check")
    assert not [name for name, ids in of(first, "train").items() if of(other, "train").get(name) == ids]


def test_spans_are_what_was_sampled_and_an_ended_answer_holds_its_end_of_turn(finished_run, tiny_target):
    stops = {1, *range(100, 108)}
    finishes = set()
    for path in finished_run.latest("generate").shards():
        for row in read_rows(path):
            assert len(row["finish"]) == len(row["spans"]) == sum(m["role"] == "assistant" for m in row["messages"])
            for span, finish in zip(row["spans"], row["finish"], strict=True):
                answer = row["input_ids"][span["start"] : span["end"]]
                assert (answer[-1] in stops) == (finish == "stop")
                assert not stops & set(answer[:-1]) and len(answer) <= 16
                finishes.add(finish)
    assert finishes == {"stop", "length"}


def test_passthrough_keeps_the_seed_s_own_answers(make_config, tmp_path):
    config = make_config(tmp_path, generate__mode="passthrough", generate__engine="vllm")
    seeds = run_flow(config, until="seeds", executor="inline", console=Console(quiet=True)).latest("seeds")
    messages = {row["id"]: row["messages"] for path in seeds.shards() for row in read_rows(path)}
    rows = rows_of(config)
    assert len(rows) == 40
    assert all(row["messages"] == messages[row["id"]] for row in rows)


def test_self_talk_writes_both_roles(make_config, tmp_path):
    rows = rows_of(make_config(tmp_path, generate__mode="self-talk", generate__rounds=3))
    roles = [[span["role"] for span in row["spans"]] for row in rows]
    assert max(roles, key=len) == ["assistant", "user", "assistant", "user", "assistant"]
    assert all(spans == ["assistant", "user", "assistant", "user", "assistant"][: len(spans)] for spans in roles)


def test_a_template_that_rewrites_its_history_gives_one_row_per_turn_and_every_seed_is_owned(
    make_config, tmp_path, tiny_target
):
    """A mark stands before the last question alone."""
    forgetful = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ 'now ' if loop.last }}{{ m['content'] + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    rows = rows_of(make_config(tmp_path, target__chat_template=forgetful))
    split = [row for row in rows if "#" in row["id"]]
    assert split and all(row["id"] == f"{row['parent_id']}#{row['id'].partition('#')[2]}" for row in split)
    assert all(len(row["spans"]) == 1 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
