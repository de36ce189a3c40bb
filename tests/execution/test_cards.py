"""GPUs of several kinds are said, and bfloat16 is refused where a worker may get one without it."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from pipeline.cli import plan_tables
from pipeline.errors import EnvironmentFault
from pipeline.execution.cards import Card, cards_of_node, counted, mixture, visible_cards
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import Resources
from pipeline.execution.ray_executor import RayExecutor
from pipeline.run import card_limits, context
from pipeline.run.card_limits import require_bfloat16
from pipeline.run.context import Context
from pipeline.run.preflight import check_config
from pipeline.storage.run_directory import RunDirectory

V100, A100, H100 = Card("V100", (7, 0)), Card("A100"), Card("H100")
HALF = {"target__dtype": "float16", "train__precision": "fp32"}


def node(gpus: int, kind: str | None, alive: bool = True) -> dict:
    """As `ray.nodes()` records one."""
    named = {f"accelerator_type:{kind}": 1.0} if kind else {}
    return {"Alive": alive, "Resources": {"CPU": 8.0, "GPU": float(gpus), "memory": 1e9, **named}}


def cluster(*nodes: dict) -> Resources:
    executor = object.__new__(RayExecutor)
    executor.watch, executor._ray = None, SimpleNamespace(nodes=lambda: list(nodes))
    return executor.resources()


def test_a_cluster_s_cards_are_those_of_its_living_nodes():
    have = cluster(node(4, "A100"), node(2, "T4"), node(8, "H100", alive=False), node(0, None), node(1, None))
    assert have.nodes == ((8, 4), (8, 2), (8, 0), (8, 1))
    assert have.cards == (*[Card("A100")] * 4, *[Card("T4", (7, 5))] * 2, Card("of an unknown kind"))
    assert cards_of_node({"CPU": 2}) == ()


def test_cards_of_several_kinds_are_counted_and_those_of_one_kind_are_not_spoken_of():
    assert mixture([A100] * 8) is None and mixture([]) is None
    assert counted([H100, A100, A100, V100]) == "2 A100, 1 H100 and 1 V100"
    said = mixture([*[A100] * 4, H100, H100])
    assert said and "different kinds: 4 A100 and 2 H100." in said and "\n" not in said


def test_this_machine_s_cards_are_torch_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: ("Tesla T4", "NVIDIA L4")[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: ((7, 5), (8, 9))[gpu])
    assert visible_cards() == (Card("Tesla T4", (7, 5)), Card("NVIDIA L4", (8, 9)))
    assert [card.lacks_bfloat16 for card in visible_cards()] == [True, False]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target__dtype": "bfloat16"}, r"the target and the heads' training \(target\.dtype, train\.precision\)"),
        ({"target__dtype": "bfloat16", "train__precision": "fp32"}, r"the target \(target\.dtype\)"),
        ({"target__dtype": "float16", "train__precision": "bf16"}, r"the heads' training \(train\.precision\)"),
        ({"target__dtype": "float16", "train__precision": "auto"}, r"train\.precision: fp32"),
    ],
)
def test_bfloat16_is_refused_before_anything_runs_where_a_worker_may_get_a_card_without_it(
    changes, named, make_config, tmp_path, monkeypatch
):
    config = make_config(tmp_path, **changes)
    with pytest.raises(EnvironmentFault, match=f"(?s)1 V100.*{named}"):
        require_bfloat16(config, [A100, V100, A100])
    monkeypatch.setattr(card_limits, "visible_cards", lambda: (V100,))
    with pytest.raises(EnvironmentFault, match=named) as caught:
        check_config(config)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    notes: list[str] = []
    check_config(config, notes=notes)
    assert any("compute capability 8.0" in note for note in notes)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_config(config)


def test_other_dtypes_newer_cards_and_stages_on_the_cpu_are_not_refused(make_config, tmp_path):
    require_bfloat16(make_config(tmp_path, **HALF), [V100])
    wanting = {"target__dtype": "bfloat16"}
    require_bfloat16(make_config(tmp_path, **wanting), [A100, Card("NVIDIA L4", (8, 9))])
    without = {f"placement__{stage}": {"gpus_per_worker": 0} for stage in ("generate", "features", "train")}
    require_bfloat16(make_config(tmp_path, **wanting, **without), [V100])


def test_a_run_on_a_cluster_asks_its_nodes(make_config, tmp_path, monkeypatch):
    class Cluster(InlineExecutor):
        name = "ray"

        def resources(self) -> Resources:
            return cluster(node(4, "A100"), node(2, "V100"))

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(context, "make_executor", lambda _: Cluster())
    said = io.StringIO()

    def check(**changes) -> None:
        config = make_config(tmp_path, **changes)
        run = Context(config, RunDirectory.create(config), Console(file=said, width=1000), "ray")
        run.check_placements({"generate", "features", "train"})

    with pytest.raises(EnvironmentFault, match="2 V100"):
        check(target__dtype="bfloat16")
    assert not said.getvalue()
    check(**HALF)
    assert said.getvalue().count("4 A100 and 2 V100") == 1


def test_plan_says_cards_of_several_kinds(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_tables, "visible_cards", lambda: (A100, H100))
    said = io.StringIO()
    plan_tables.print_workers(Console(file=said, width=1000), make_config(tmp_path))
    assert "1 A100 and 1 H100" in said.getvalue()
