"""GPUs of several kinds are said; bfloat16 and quantized weights are refused where a worker may get one too old."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from pipeline.cli import plan_tables
from pipeline.errors import EnvironmentFault
from pipeline.execution.cards import Card, cards_of_node, counted, mixture, visible_cards
from pipeline.execution.cluster_watch import ClusterWatch
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import Resources
from pipeline.execution.ray_executor import RayExecutor
from pipeline.run import card_limits, context
from pipeline.run.card_limits import require_bfloat16, require_formats
from pipeline.run.context import Context
from pipeline.run.preflight import check_config
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.vllm_capability import vllm_capability

V100, A100, H100 = Card("V100", (7, 0)), Card("A100"), Card("H100")
HALF = {"target__dtype": "float16", "train__precision": "fp32"}


def node(gpus: int, kind: str | None, alive: bool = True) -> dict:
    """As `ray.nodes()` records one."""
    named = {f"accelerator_type:{kind}": 1.0} if kind else {}
    return {"Alive": alive, "Resources": {"CPU": 8.0, "GPU": float(gpus), "memory": 1e9, **named}}


def cluster(*nodes: dict) -> Resources:
    executor = object.__new__(RayExecutor)
    executor.watch = ClusterWatch({}, patience=0.0)
    with mock.patch("pipeline.execution.ray_executor.ray.nodes", lambda: list(nodes)):
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


@pytest.fixture
def quantized(tmp_path):
    """`quantized("fp8")`: the directory of a target in this format, of which there is a config.json alone."""

    def make(method: str) -> str:
        content = LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            num_hidden_layers=1,
            vocab_size=96,
            architectures=["LlamaForCausalLM"],
        )
        (tmp_path / method).mkdir()
        settings = {"quantization_config": {"quant_method": method}} if method != "plain" else {}
        (tmp_path / method / "config.json").write_text(json.dumps({**content.to_dict(), **settings}))
        return str(tmp_path / method)

    return make


def test_quantized_weights_are_refused_where_vllm_may_get_a_card_too_old_for_them(
    quantized, make_config, tmp_path, monkeypatch
):
    """8-bit floats from Turing on, though only Ada and Hopper multiply them; transformers expands them."""
    fp8 = quantized("fp8")
    serving = make_config(tmp_path, **HALF, target__model=fp8, check__engines=["vllm"])
    with pytest.raises(
        EnvironmentFault, match=r"fp8, which vLLM .* 7\.5 or above, .*: 1 V100 \(target\.model\)"
    ) as old:
        require_formats(serving, [A100, V100])
    assert old.value.exit_code == 4 and "\n" not in str(old.value)
    require_formats(serving, [A100, Card("T4", (7, 5)), H100])
    require_formats(make_config(tmp_path, **HALF, target__model=fp8, check__engines=["native"]), [V100])
    require_formats(make_config(tmp_path, **HALF, target__model=quantized("plain"), check__engines=["vllm"]), [V100])
    without = {f"placement__{stage}": {"gpus_per_worker": 0} for stage in ("generate", "features")}
    require_formats(make_config(tmp_path, **HALF, target__model=fp8, check__engines=["vllm"], **without), [V100])
    require_formats(serving, [V100], ["train"])
    answering = make_config(
        tmp_path,
        **HALF,
        target__model=fp8,
        check__engines=["native"],
        calibrate__data="questions.jsonl",
        generate__engine="vllm",
        calibrate__draft_tokens=1,
    )
    with pytest.raises(EnvironmentFault, match="which vLLM reads on GPUs"):
        require_formats(answering, [V100], ["calibrate"])
    monkeypatch.setattr(card_limits, "visible_cards", lambda: (V100,))
    notes: list[str] = []
    check_config(serving, notes=notes)
    assert any("which vLLM reads on GPUs" in note for note in notes)


def test_a_served_copy_is_refused_as_a_target_is(quantized, make_config, tmp_path):
    copy = quantized("fbgemm_fp8")
    settings = {"target__model": quantized("plain"), "check__served_model": copy, "check__engines": ["vllm"]}
    with pytest.raises(EnvironmentFault, match=r"8\.0 or above, .*: 1 T4 \(check\.served_model\)"):
        require_formats(make_config(tmp_path, **HALF, **settings), [Card("T4", (7, 5))])


def compressed(bits: int, kind: str, strategy: str = "channel", group_size: int | None = None, **sides: dict) -> dict:
    """The settings of compressed-tensors with one group of layers."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size}
    layers = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **sides}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": layers}}


OF_TOKENS, OF_TENSORS = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
SCHEMES = "compressed_tensors/schemes/compressed_tensors"


@pytest.mark.parametrize(
    ("settings", "file", "config"),
    [
        ({"quant_method": "fp8"}, "fp8", "Fp8Config"),
        ({"quant_method": "awq"}, "auto_awq", "AutoAWQConfig"),
        ({"quant_method": "gptq"}, "auto_gptq", "AutoGPTQConfig"),
        ({"quant_method": "torchao"}, "torchao", "TorchAOConfig"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "FBGEMMFp8Config"),
        ({"quant_method": "fp_quant"}, "fp_quant", "FPQuantConfig"),
        ({"quant_method": "experts_int8"}, "experts_int8", "ExpertsInt8Config"),
        ({"quant_method": "humming"}, "humming", "HummingConfig"),
        ({"quant_method": "moe_wna16"}, "moe_wna16", "MoeWNA16Config"),
        ({"quant_method": "quark"}, "quark/quark", "QuarkConfig"),
        ({"quant_method": "mxfp4"}, "mxfp4", "Mxfp4Config"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt", "ModelOptFp8Config"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt", "ModelOptNvFp4Config"),
        ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, "modelopt", "ModelOptMxFp8Config"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt", "ModelOptMixedPrecisionConfig"),
        (compressed(8, "float"), f"{SCHEMES}_w8a16_fp8", "CompressedTensorsW8A16Fp8"),
        (
            compressed(8, "float", input_activations=FLOAT8 | OF_TOKENS),
            f"{SCHEMES}_w8a16_fp8",
            "CompressedTensorsW8A16Fp8",
        ),
        (compressed(4, "int", "group", 128), f"{SCHEMES}_wNa16", "CompressedTensorsWNA16"),
        (compressed(8, "int", input_activations=INT8 | OF_TOKENS), f"{SCHEMES}_w8a8_int8", "CompressedTensorsW8A8Int8"),
        (compressed(4, "float", "tensor_group", 16), f"{SCHEMES}_w4a4_nvfp4", "CompressedTensorsW4A4Fp4"),
        (compressed(4, "float", "group", 32), f"{SCHEMES}_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4"),
        (compressed(8, "float", "group", 32), f"{SCHEMES}_w8a8_mxfp8", "CompressedTensorsW8A8Mxfp8"),
        (
            compressed(4, "int", "group", 128, input_activations=FLOAT8 | OF_TOKENS),
            f"{SCHEMES}_w4a8_fp8",
            "CompressedTensorsW4A8Fp8",
        ),
        (
            compressed(8, "int", input_activations=INT8 | OF_TENSORS, output_activations=INT8 | OF_TENSORS),
            f"{SCHEMES}_wNa8o8",
            "CompressedTensorsWNA8O8Int",
        ),
        ({"quant_method": "compressed-tensors"}, "compressed_tensors/compressed_tensors", "CompressedTensorsConfig"),
    ],
)
def test_the_capabilities_are_those_of_the_vllm_that_is_installed(settings, file, config):
    """Read from its source, since importing it takes long."""
    places = importlib.util.find_spec("vllm").submodule_search_locations
    source = ast.parse((Path(places[0]) / "model_executor/layers/quantization" / f"{file}.py").read_text())
    (named,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == config)
    (least,) = (each for each in named.body if getattr(each, "name", "") == "get_min_capability")
    (returned,) = (each.value.value for each in ast.walk(least) if isinstance(each, ast.Return))
    needed = vllm_capability(SimpleNamespace(quantization_config=settings))
    assert divmod(returned, 10) == needed[:2]


def test_a_scheme_is_told_as_its_strictest_group_of_layers_and_one_of_hopper_s_alone():
    w4a8 = compressed(4, "int", "group", 128, input_activations=FLOAT8 | OF_TOKENS)
    mixed = compressed(4, "float", "group", 32)
    mixed["config_groups"]["group_1"] = w4a8["config_groups"]["group_0"]
    for settings in (w4a8, mixed):
        needed = vllm_capability(SimpleNamespace(quantization_config=settings))
        assert [needed.has(of_card) for of_card in ((8, 9), (9, 0), (10, 0))] == [False, True, False]
        assert str(needed) == "9.0 alone"
    assert vllm_capability(SimpleNamespace(quantization_config=None)) is None


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


def finish(config, *stages: str) -> None:
    for name in stages:
        directory = config.run.directory / f"{name}-0000"
        directory.mkdir(parents=True)
        (directory / "DONE.json").write_text("{}")


@pytest.mark.parametrize(
    ("left", "section", "refused"),
    [
        ("check", "features", True),
        ("check", "generate", False),
        ("calibrate", "features", True),
        ("export", "features", False),
    ],
)
def test_cards_are_looked_at_for_what_is_left_to_run_whatever_else_its_section_places(
    left, section, refused, make_config, tmp_path, monkeypatch
):
    """A check that decodes natively, alone: on the workers of `features`, whose stage is finished."""
    given = {
        f"placement__{name}": {"gpus_per_worker": int(name == section)} for name in ("generate", "features", "train")
    }
    timing = {"calibrate__nodes": "auto"}  # where native decoding works
    config = make_config(tmp_path, target__dtype="bfloat16", check__engines=["native"], **timing, **given)
    finish(config, *({"generate", "features", "train", "calibrate", "check"} - {left}))
    monkeypatch.setattr(card_limits, "visible_cards", lambda: (V100,))
    notes: list[str] = []
    check_config(config, notes=notes)
    assert any("the target (target.dtype)" in note for note in notes) == refused
    assert not any("training" in note for note in notes), "which is finished"


def test_a_check_that_is_left_alone_is_placed_where_its_engines_decode(make_config, tmp_path):
    config = make_config(tmp_path, check__engines=["native"], placement__generate={"gpus_per_worker": 4})
    finish(config, "generate", "features", "train", "calibrate")
    run = Context(config, RunDirectory.create(config), Console(quiet=True), "inline")
    run.check_placements(["check"])
    serving = config.model_copy(update={"check": config.check.model_copy(update={"engines": ("native", "vllm")})})
    with pytest.raises(EnvironmentFault, match="cannot place generate"):
        Context(serving, RunDirectory.create(config), Console(quiet=True), "inline").check_placements(["check"])


def test_plan_says_cards_of_several_kinds(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_tables, "visible_cards", lambda: (A100, H100))
    said = io.StringIO()
    plan_tables.print_workers(Console(file=said, width=1000), make_config(tmp_path))
    assert "1 A100 and 1 H100" in said.getvalue()
