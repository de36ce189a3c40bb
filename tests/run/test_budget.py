"""What stages take of memory is said, and what cannot fit is refused with what would; sizes are config.json's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from pipeline.config import Config
from pipeline.errors import EnvironmentFault
from pipeline.execution import device_memory
from pipeline.execution.device_memory import GIB, machine_memory, unusable_driver
from pipeline.run.budget import budgets, sizes_of
from pipeline.run.fitting import check_memory, require_fit, what_fits
from pipeline.run.stage_budget import StageBudget
from pipeline.targets.sizes import forward_bytes
from tests.fake_cuda.ledger import Ledger

# Mistral-7B, Llama-3-8B and Llama-3-70B: billions of parameters; hidden, inner, layers, heads, KV heads, vocabulary.
SHAPES = {
    "7B": (7.24, 4096, 14336, 32, 32, 8, 32000),
    "8B": (8.03, 4096, 14336, 32, 32, 8, 128256),
    "70B": (70.55, 8192, 28672, 80, 64, 8, 128256),
}
MEDUSA = {"train__heads": "medusa", "train__num_heads": 5, "train__batch_tokens": "auto", "train__precision": "auto"}


@pytest.fixture
def planned(make_config, tmp_path):
    """`planned("70B", **settings)`: a configuration for GPUs of 80 GB, of a target that is a config.json alone."""

    def make(shape: str, **changes) -> Config:
        _, hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
        directory = tmp_path / shape
        directory.mkdir(exist_ok=True)
        content = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )
        (directory / "config.json").write_text(json.dumps(content.to_dict()))
        usual = {"target__model": str(directory), "placement__gpu_memory_gb": 80, **MEDUSA}
        return make_config(tmp_path, **usual | changes)

    return make


def budget_of(config: Config, stage: str) -> StageBudget:
    sizes = sizes_of(config)
    assert sizes is not None
    return next(each for each in budgets(config, sizes) if each.stage == stage)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_s_weights_are_counted_from_its_configuration(planned, shape):
    """Billions of parameters as their authors state them, two bytes each; a quarter of that in 4 bit, and scales."""
    expected = SHAPES[shape][0] * 1e9 * 2
    assert budget_of(planned(shape), "features").memory.weights == pytest.approx(expected, rel=0.002)
    halves = budget_of(planned(shape, placement__features={"gpus_per_worker": 2}), "features").memory
    assert halves.weights == pytest.approx(expected / 2, rel=0.002)
    small = budget_of(planned(shape, target__quantization="4bit"), "features").memory.weights
    assert 0.25 * expected < small < 0.4 * expected, "lm_head and embedding are not quantized"


@pytest.mark.parametrize(("shape", "gib"), [("7B", 18), ("8B", 47), ("70B", 95)])
def test_untied_heads_take_what_a_ledger_of_their_step_counted(planned, shape, gib):
    """Five untied heads on one GPU in bf16, AdamW in 32 bit, 16,384 positions, soft labels."""
    memory = budget_of(planned(shape), "train").memory
    assert memory.total / GIB == pytest.approx(gib, rel=0.1)
    parameters = 5 * SHAPES[shape][1] * (SHAPES[shape][1] + 1 + SHAPES[shape][6])
    assert memory.heads == 4 * parameters and memory.optimizer == 8 * parameters


def test_what_cannot_fit_is_refused_before_a_run_with_its_sum_and_what_would_fit(planned):
    config = planned("70B")
    with pytest.raises(EnvironmentFault) as refused:
        check_memory(config, ["seeds", "generate", "features", "train", "calibrate", "export", "check"])
    said = str(refused.value)
    assert refused.value.exit_code == 4 and "\n" not in said and not Path(config.run.directory).exists()
    assert "train takes 9" in said and "optimizer 41.6" in said and "80.0 GiB" in said
    split = "train.shard_heads=true placement.train.workers=2"
    for fitting in ("train.optimizer=adamw-8bit", split, "train.medusa.lm_head=tied", "train.heads=recurrent"):
        assert fitting in said
    assert "placement.features.gpus_per_worker=2" in said


@pytest.mark.parametrize("method", ["medusa-1", "medusa-2"])
def test_several_workers_split_heads_that_they_would_not_hold_whole_and_no_others(planned, method):
    """Weights and moments are 12 bytes a number, whole or in parts; what is not an lm_head is whole meanwhile."""
    several = {"train__method": method, "placement__train": {"workers": 8}, "train__backbone": {"shard": True}}
    whole = budget_of(planned("70B", train__shard_heads=False, **several), "train")
    found = budget_of(planned("70B", **several), "train")
    asked = budget_of(planned("7B", train__shard_heads=True, **several), "train").memory
    assert found.fits and not whole.fits and found.whole == whole.memory
    saved = whole.memory.heads + whole.memory.optimizer - found.memory.heads - found.memory.optimizer
    (size, vocab_size), blocks = (SHAPES["70B"][1], SHAPES["70B"][6]), 5 * SHAPES["70B"][1] * (SHAPES["70B"][1] + 1)
    assert saved == 12 * 7 / 8 * (5 * size * vocab_size + blocks) - 4 * blocks
    small = budget_of(planned("7B", **several), "train").memory
    assert asked.heads < small.heads and small == budget_of(planned("7B", **several), "train").whole


def test_as_many_workers_as_there_is_room_for_split_heads_over_the_gpus_of_this_machine(planned, monkeypatch):
    auto, eight = ({"placement__train": {"workers": workers}} for workers in ("auto", 8))
    expected = budget_of(planned("70B", **eight), "train").memory
    monkeypatch.setattr("pipeline.run.budget.gpu_memory", lambda: 80.0 * GIB)
    monkeypatch.setattr("pipeline.run.budget.num_gpus", lambda: 8)
    here = planned("70B", placement__gpu_memory_gb=None, **auto)
    assert budget_of(here, "train").fits and budget_of(here, "train").memory == expected
    assert not budget_of(planned("70B", **auto), "train").fits, "how many GPUs there are elsewhere nobody knows"
    by_two = {"placement__train": {"workers": "auto", "gpus_per_worker": 2}}
    of_four = budget_of(planned("70B", **{"placement__train": {"workers": 4}}), "train").memory
    assert budget_of(planned("70B", placement__gpu_memory_gb=None, **by_two), "train").memory == of_four
    on_cpu = {"placement__train": {"workers": "auto", "gpus_per_worker": 0}}
    assert budget_of(planned("7B", placement__gpu_memory_gb=None, **on_cpu), "train").on_device == 1
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    assert budget_of(here, "train").memory != expected


@pytest.mark.slow
def test_calibrate_and_a_served_copy_have_rows_and_the_host_s_memory_is_said(planned, make_config):
    """Heads in fp32 on train's GPU; nine caches beside the target; a copy in 4 bits of a target in 16."""
    copy = planned("7B").target.model
    config = json.loads((Path(copy) / "config.json").read_text())
    served = Path(copy).parent / "served"
    served.mkdir()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (served / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    planning = planned("7B", check__served_model=str(served), calibrate__nodes="auto")
    weights = 5 * 4096 * (4096 + 1 + 32000)
    assert budget_of(planning, "calibrate").memory.heads == 4 * weights
    check, timing = (budget_of(planning, stage).memory for stage in ("check", "timing"))
    assert timing.heads == check.heads == 2 * weights and timing.cache > 4 * check.cache
    of_copy = budget_of(planning, "served copy")
    assert 0.25 * check.weights < of_copy.memory.weights < 0.4 * check.weights
    in_vllm = planned("7B", check__served_model=str(served), check__engines=["vllm"])
    assert budget_of(in_vllm, "vLLM copy").memory.weights == of_copy.memory.weights
    assert budget_of(in_vllm, "vLLM copy").memory.heads == check.heads
    placed = {stage: budget_of(planning, stage).placed for stage in ("calibrate", "timing", "served copy", "train")}
    assert placed == {"calibrate": "calibrate", "timing": "calibrate", "served copy": "check", "train": "train"}
    assert budget_of(planning, "features").on_host == 2 * GIB and budget_of(planning, "train").on_host == 4 * weights
    in_vllm = planned("7B", features__engine="vllm")
    assert budget_of(in_vllm, "features").on_host == 2 * GIB, "whichever engine computes"
    stages = {each.stage for each in budgets(planned("7B", calibrate__nodes=15), sizes_of(planning))}
    assert not stages & {"timing", "served copy"}, "nothing is timed or copied"


HEADS_IN_VLLM = {  # numbers of 7B heads as the export stores them: those with a row for each token, and the others
    "untied": ({}, 5 * 32000 * 4096, 5 * 4096 * 4097),
    "tied": ({"train__medusa": {"lm_head": "tied"}}, 5 * 32000 * 4096, 5 * 4096 * 4097),
    "stored once": (
        {"train__medusa": {"lm_head": "tied"}, "export__formats": ["shared"]}, 32000 * 4096, 5 * 4096 * 4097
    ),
    "recurrent": ({"train__heads": "recurrent"}, 0, 14 * 4096**2 + 4096 + 2 * 4096 * 512 + 2 * 4096 * 64),
}  # fmt: skip


@pytest.mark.parametrize("heads", HEADS_IN_VLLM)
def test_the_check_in_vllm_has_a_row_of_its_share_of_the_card(planned, heads):
    """0.92 of it and 1 GiB less, of which keys and values get what is left; over two GPUs halves, but for blocks."""
    changes, by_token, others = HEADS_IN_VLLM[heads]
    changes = changes | {"check__engines": ["vllm"], "check__max_new_tokens": 32}
    one = budget_of(planned("7B", **changes), "vLLM check")
    two = budget_of(planned("7B", **changes, placement__generate={"gpus_per_worker": 2}), "vLLM check")
    assert one.memory.heads == 2 * (by_token + others)
    assert two.memory.heads == pytest.approx(2 * (by_token / 2 + others))
    for gpus, found in ((1, one), (2, two)):
        assert found.memory.weights == pytest.approx(7.24e9 * 2 / gpus, rel=0.002)
        assert found.memory.total == pytest.approx(0.92 * 80 * GIB - GIB) and found.fits and found.placed == "check"
        assert found.least.cache == 2 * 32 * 8 * 128 * 2 * (4096 + 32) / gpus, "a prompt and an answer"


def test_a_target_whose_check_in_vllm_cannot_fit_is_refused_with_what_would(planned):
    """16 GB of weights fit on a GPU of 19 GB beside recurrent heads, and not beside five lm_heads of 128k tokens."""
    usual = {"check__engines": ["vllm"], "check__max_new_tokens": 32, "placement__gpu_memory_gb": 22}
    fitting, found = planned("8B", **usual, train__heads="recurrent"), planned("8B", **usual)
    assert budget_of(fitting, "vLLM check").fits and not budget_of(found, "vLLM check").fits
    with pytest.raises(EnvironmentFault, match=r"vLLM check takes .* of 19\.2 GiB") as refused:
        require_fit(found, sizes_of(found), [budget_of(found, "vLLM check")])
    assert refused.value.exit_code == 4
    offered = str(refused.value).partition("vLLM check: ")[2].split(" or ")
    assert [offer.partition(" (")[0] for offer in offered] == [
        "placement.generate.gpus_per_worker=2",
        "train.medusa.lm_head=shared export.formats=[shared]",
        "train.medusa.lm_head=tied export.formats=[shared]",
        "train.heads=recurrent",
        "check.engines=[native]",
    ]
    assert "(without vLLM)" in offered[-1]
    natively = {each.stage for each in budgets(planned("8B"), sizes_of(found))}
    assert "vLLM check" not in natively and "check" in natively


def test_timing_is_refused_only_where_short_prompts_would_not_fit_either(planned):
    config = planned("8B", placement__gpu_memory_gb=24, calibrate__nodes="auto")
    timing = budget_of(config, "timing")
    assert timing.fits and not timing.fits_at_once and "prompts are short" in timing.otherwise
    small = planned("8B", placement__gpu_memory_gb=20, calibrate__nodes="auto")
    assert not budget_of(small, "timing").fits
    offers = what_fits(small, sizes_of(small), budget_of(small, "timing"))
    assert offers.startswith("calibrate.nodes=63 (without timing)"), "the target stays what it is"
    large = planned("70B", placement__gpu_memory_gb=20)
    offers = what_fits(large, sizes_of(large), budget_of(large, "calibrate"))
    assert offers and not any(key in offers for key in ("optimizer", "batch_tokens", "shard_heads")), "it has none"


def test_each_thing_that_would_fit_does(planned):
    """Also of Medusa-2, where no single setting helps but to split layers over eight workers, and heads with them."""
    joint = {"train__method": "medusa-2", "placement__features": {"gpus_per_worker": 8}}
    config = planned("70B", **joint)
    assert not budget_of(config, "train").fits
    with pytest.raises(EnvironmentFault) as refused:
        require_fit(config, sizes_of(config), [budget_of(config, "train")])
    offered = str(refused.value).partition("What would fit: train: ")[2].split(" or ")
    assert offered[0].startswith("train.backbone.shard=true placement.train.workers=8")
    for offer in offered:
        words = [word.split("=") for word in offer.partition(" (")[0].split()]
        changes = {key.replace(".", "__"): {"true": True}.get(value, value) for key, value in words}
        workers = {key: int(value) for key, value in changes.items() if key.endswith("workers")}
        assert budget_of(planned("70B", **joint, **changes | workers), "train").fits, offer


def test_a_finished_stage_is_not_refused_and_a_machine_s_memory_is_shared_by_its_workers(
    planned, tmp_path, monkeypatch
):
    config = planned("7B", placement__gpu_memory_gb=None, placement__train={"workers": 4})
    monkeypatch.setattr("pipeline.run.budget.gpu_memory", lambda: None)
    monkeypatch.setattr("pipeline.run.budget.machine_memory", lambda: 30.0 * GIB)
    train = budget_of(config, "train")
    assert not train.device.on_gpu and train.memory.total < 30 * GIB < 4 * train.memory.total and not train.fits
    with pytest.raises(EnvironmentFault, match=r"in each of 4 workers.*this machine has 30\.0 GiB"):
        check_memory(config, ["train"])
    finished = tmp_path / "run" / "train-0123"
    finished.mkdir(parents=True)
    (finished / "DONE.json").touch()
    check_memory(config, ["train"])


def test_run_refuses_no_batches_that_so_few_positions_do_not_make(planned):
    """They are counted only where the largest batches do not fit."""
    counted = []
    many, few = 10**8, 40_000

    def count(number: int):
        return lambda: counted.append(number) or number

    roomy, tight = (planned("7B", placement__gpu_memory_gb=size) for size in (80, 17.5))
    check_memory(roomy, ["train"], count(many))
    assert not counted
    check_memory(tight, ["train"], count(few))
    with pytest.raises(EnvironmentFault, match="train takes"):
        check_memory(tight, ["train"], count(many))
    assert counted == [few, many]


def test_a_conversation_in_sliding_windows_takes_what_vllm_keeps_of_it(make_config, tmp_path):
    """Gemma 3's layers, of which every sixth sees all: 131,072 tokens there, the window and a forward elsewhere."""
    layers = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(62)]
    content = Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=262208,
        sliding_window=1024,
        layer_types=layers,
        max_position_embeddings=131072,
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
    )
    (tmp_path / "config.json").write_text(json.dumps(content.to_dict()))
    config = make_config(
        tmp_path, **MEDUSA, target__model=str(tmp_path), placement__gpu_memory_gb=80, generate__engine="vllm"
    )
    generate = budget_of(config, "generate")
    in_a_layer = 2 * 16 * 128 * 2
    assert generate.least.cache == in_a_layer * (10 * 131072 + 52 * (1024 + 8192)) and generate.fits
    small = config.model_copy(update={"placement": config.placement.model_copy(update={"gpu_memory_gb": 70})})
    offered = what_fits(small, sizes_of(small), budget_of(small, "generate"))
    assert "target.max_tokens=" in offered, "the shorter a conversation may be, the less has to fit"


@pytest.mark.slow
def test_a_forward_takes_what_is_planned_for_it(planned):
    """Counted while a model of two layers of a tenth of the size runs, all of whose operations are real."""
    shape = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=64)).to(torch.bfloat16)
    sizes = sizes_of(planned("7B"))
    assert sizes is not None
    with torch.inference_mode(), Ledger() as ledger:
        model.base_model(input_ids=torch.zeros(1, 4096, dtype=torch.long), use_cache=False)
    assert forward_bytes(sizes, 4096) / 16 == pytest.approx(ledger.peak["cpu"], rel=0.25)


def test_a_container_s_limit_is_the_machine_s_memory(tmp_path):
    limit, none = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("1073741824\n")
    none.write_text("max\n")
    assert machine_memory((str(limit), str(none), str(tmp_path / "absent"))) == GIB
    assert machine_memory((str(none),)) > GIB


def test_a_driver_that_torch_cannot_use_is_named_and_one_that_is_hidden_is_not(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\nGCC version: 9\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = unusable_driver({}, driver)
    assert said and "470.57.02" in said and "13.0" in said and "\n" not in said
    assert unusable_driver({"CUDA_VISIBLE_DEVICES": ""}, driver) is None
    assert unusable_driver({}, tmp_path / "absent") is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unusable_driver({}, driver) is None


def test_a_gpu_keeps_some_memory_from_torch():
    gpu = device_memory.Device("its GPU", 80 * GIB, on_gpu=True)
    assert 75 * GIB < gpu.room < 79 * GIB
    assert device_memory.Device("this machine", 80 * GIB, on_gpu=False).room == 80 * GIB
