"""Estimate a run before it starts: tokens, disk, and the memory of each stage's worker.

Tokens are upper bounds until `generate` has counted them. Memory is arithmetic on config.json and
settings, good to about `TOLERANCE`: what allocators and vLLM hold beside tensors is not counted.

Letters: N positions of a micro-batch on one worker, K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.config.training import Bits
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import mixed, source_readers
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB, gpu_memory, machine_memory
from pipeline.execution.placement import Resources
from pipeline.heads.kind import Heads
from pipeline.heads.losses import chunk_bytes_on
from pipeline.run.resolved import ENGINE_SECTIONS, TARGET, ResolvedRun
from pipeline.storage.receipts import Summary
from pipeline.targets.spec import cached_numbers, quantization_of
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.recipe import Recipe
from pipeline.training.task import Learner

TOLERANCE = 0.2  # of an estimate of memory
ASSUMED_HIDDEN_SIZE = 4096  # a 7B model's, while the target cannot be looked up
MANY_POSITIONS = 10**8  # makes the largest batches of the recipe, while positions are not counted
FORWARD_TOKENS = 4096  # of a conversation, and of a forward
HELD_IN_FORWARD = 14  # numbers of a token in a Llama-like decoder layer, in multiples of D
KEPT_FOR_BACKWARD = 36  # the same
KEPT_BY_MATRICES = 1.75  # numbers that heads keep of a position, times their matrices' size over D
FP32 = 4  # bytes
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2}  # bytes of a parameter's two moments
BITS: dict[Bits, int] = {"8bit": 8, "4bit": 4}
FOUR_BITS = ("'num_bits': 4", "'bits': 4", "'w_bit': 4", "'load_in_4bit': True")
"""How the settings of a quantized checkpoint state 4 bits."""


@dataclass(frozen=True)
class RunSize:
    """Upper bounds until generate has run: every answer is as long as it may be."""

    conversations: int | None  # None where a data set on the Hub has no limit
    tokens: int | None  # to write, and to cache a state of each
    bytes_per_position: int  # 0 where no state is cached
    written: bool  # whether the tokens are there already, and counted
    positions: int  # to train on; 0 while unknown
    recipes: tuple[Recipe, ...]  # of training's phases; empty while positions are unknown

    @property
    def disk_bytes(self) -> int | None:
        return None if self.tokens is None else self.tokens * self.bytes_per_position


def planned(run: ResolvedRun) -> ResolvedRun:
    """The run on GPUs elsewhere, where `placement.gpu_memory_gb` gives their memory."""
    if run.config.placement.gpu_memory_gb is None:
        return run
    return run.on(Resources(((run.machine.cpus, 1),)))


def run_size(run: ResolvedRun, seeds: Summary | None, generated: Summary | None) -> RunSize:
    """Tokens to write and to cache, and the bytes of each.

    States of a target that cannot be reached now are counted as a 7B model's.

    Args:
        seeds, generated: The summaries of these stages, where they are done.
    """
    train, generate = run.config.train, run.config.generate
    hidden_size, dtype = ASSUMED_HIDDEN_SIZE, torch.bfloat16
    longest = generate.rounds * generate.max_new_tokens
    if TARGET in run.models:
        hidden_size, dtype = run.shape.hidden_size, getattr(torch, run.target.dtype)
        longest = min(longest, run.context)
    rows, train_share = _count_conversations(run, seeds), 1 - run.config.seeds.holdout
    if seeds and rows:
        train_share = seeds["train_rows"] / rows
    tokens = None if rows is None else rows * longest
    if generated:
        tokens = int(generated.get("tokens", 0))
    stored = 0
    if "features" not in run.method.skipped(train):
        stored = StateFormat(dtype, hidden_size, run.config.features.precision).stored_bytes
    positions, recipes = round((tokens or 0) * train_share), []
    for _, learner in run.method.phases(train) if positions else ():
        recipes.append(learner.expected_recipe(train, positions, hidden_size, run.kind.lr_scale))
    return RunSize(rows, tokens, stored, bool(generated), positions, tuple(recipes))


def _count_conversations(run: ResolvedRun, seeds: Summary | None) -> int | None:
    """The conversations in local files, and as many of the Hub's as their limits allow."""
    if seeds:
        return int(seeds["rows"])
    count, local = 0, []
    for reader in source_readers(run.config.seeds):
        if reader.source.path:
            local.append(reader)
        elif reader.source.limit is None:
            return None
        else:
            count += reader.source.limit
    return count + sum(isinstance(row, Conversation) for row in mixed(local))


@dataclass(frozen=True)
class TargetSizes:
    """A target in numbers, not bytes."""

    parameters: int  # tied ones once
    linear: int  # of the linear layers but lm_head: what quantization makes smaller
    adapted: int  # inputs and outputs of these layers: LoRA's parameters per rank
    itemsize: int  # bytes of a number in the target's dtype
    stored_bits: int  # of a linear layer's number in the files

    def weight_bytes(self, quantization: Bits | None = None) -> float:
        """All weights as they are loaded; `quantization` is bitsandbytes', on loading."""
        bits = BITS[quantization] if quantization else self.stored_bits
        return (self.parameters - self.linear) * self.itemsize + self.linear * bits / 8


def target_sizes(run: ResolvedRun) -> TargetSizes | None:
    """The sizes of the target in its workers' dtype; None where it cannot be reached now, and of a
    model whose code needs its weights.
    """
    from transformers import AutoModelForCausalLM

    if TARGET not in run.models:
        return None
    config, spec = copy.deepcopy(run.target_config), run.target
    itemsize = getattr(torch, spec.dtype).itemsize
    stored_bits, quantization = 8 * itemsize, quantization_of(config)
    if quantization:
        is_four_bits = any(words in str(quantization) for words in FOUR_BITS)
        stored_bits = 4 if is_four_bits else 8
        del config.quantization_config
    try:
        with torch.device("meta"):  # where parameters have shapes and take no memory
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=spec.trust_remote_code
            )
    except Exception:  # any error of a family's own code
        return None
    lm_head, linear, adapted = model.get_output_embeddings(), 0, 0
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not lm_head:
            linear += layer.weight.numel()
            adapted += sum(layer.weight.shape)
    return TargetSizes(model.num_parameters(), linear, adapted, itemsize, stored_bits)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one worker of a stage holds on one of its devices at its peak."""

    stage: str
    device_bytes: float | None  # None where it is not known from here
    on_gpu: bool
    sharing: int  # workers on one device: without GPUs, all of the machine's
    name: str = ""  # as `plan` prints it
    saves_memory: tuple[str, ...] = ()  # the settings that help most
    weights: float = 0  # the target's
    heads: float = 0  # with the adapter, where one trains
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0  # states, logits and batches
    cache: float = 0  # keys and values

    @property
    def total(self) -> float:
        trained = self.heads + self.gradients + self.optimizer
        return self.weights + trained + self.activations + self.cache

    def fits(self, tolerance: float = TOLERANCE) -> bool:
        """Whether the stage fits in device memory, within the tolerance."""
        if self.device_bytes is None:
            return True
        return self.total * self.sharing <= (1 + tolerance) * self.device_bytes


def memory_of_stages(
    run: ResolvedRun, target: TargetSizes, positions: int = 0
) -> list[StageMemory]:
    """The memory of every stage that needs much.

    Args:
        positions: To train on; without them batches are the largest that the recipe makes.
    """
    found = []
    if run.config.generate.mode != "passthrough":
        found.append(_decoding(run, target, "generate", "generate", num_texts=1))
    features = "features"
    if features in run.method.skipped(run.config.train):
        features = "tuned-features"
    found.append(_decoding(run, target, features, "features", num_texts=0))
    heads = HeadsSizes.of(run)
    for name, learner in run.method.phases(run.config.train):
        phase = _training(run, target, heads, learner, positions or MANY_POSITIONS)
        found.append(replace(phase, name=name or "train"))
    for engine in run.config.check.engines:
        check = _decoding(run, target, "check", ENGINE_SECTIONS[engine], num_texts=2)
        heads_bytes = heads.weights * target.itemsize
        found.append(replace(check, name=f"check, {engine}", sharing=1, heads=heads_bytes))
    return found


def _on_device(run: ResolvedRun, stage: str, section: str) -> StageMemory:
    """A stage that holds nothing yet, on the devices that a section of `placement` gives it."""
    if run.gpus_of(section):
        gigabytes = run.config.placement.gpu_memory_gb
        return StageMemory(stage, gigabytes * GIB if gigabytes else gpu_memory(), True, 1, stage)
    memory = None if os.environ.get("RAY_ADDRESS") else machine_memory()
    return StageMemory(stage, memory, False, run.workers_of(section), stage)


def _decoding(
    run: ResolvedRun, target: TargetSizes, stage: str, section: str, num_texts: int
) -> StageMemory:
    """A stage that runs the target without gradients and caches so many conversations."""
    gpus, text = max(1, run.gpus_of(section)), FORWARD_TOKENS * target.itemsize
    return replace(
        _on_device(run, stage, section),
        saves_memory=(
            f"placement.{section}.gpus_per_worker: {2 * gpus}",
            "target.quantization: 4bit (without vLLM)",
            "target.model: a copy in fewer bits",
        ),
        weights=target.weight_bytes(run.config.target.quantization) / gpus,
        activations=HELD_IN_FORWARD * run.shape.hidden_size * text,
        cache=num_texts * cached_numbers(run.target_config) * text / gpus,
    )


@dataclass(frozen=True)
class HeadsSizes:
    """Element counts of a set of heads."""

    weights: int
    trained: int
    lm_head: int  # of one head
    kept: float  # of a position, for backward

    @classmethod
    def of(cls, run: ResolvedRun) -> HeadsSizes:
        shape = run.shape.drafting(run.config.train.draft_vocab)
        hidden_size, meta = shape.hidden_size, torch.device("meta")
        heads, one_head = (
            run.kind(sizes, device=meta) for sizes in (shape, replace(shape, num_heads=1))
        )
        matrices = _trained(one_head)
        if heads.lm_head.requires_grad:
            matrices -= one_head.lm_head.numel()
        return cls(
            weights=sum(weight.numel() for weight in heads.parameters()),
            trained=_trained(heads),
            lm_head=shape.vocab_size * hidden_size,
            kept=shape.num_heads * (KEPT_BY_MATRICES * matrices / hidden_size + hidden_size),
        )


def _trained(heads: Heads) -> int:
    return sum(weight.numel() for weight in heads.parameters() if weight.requires_grad)


def _training(
    run: ResolvedRun,
    target: TargetSizes,
    heads: HeadsSizes,
    learner: type[Learner],
    positions: int,
) -> StageMemory:
    """A step of training, at its peak in the loss."""
    train, tuned = run.config.train, run.config.train.backbone
    stage = _on_device(run, "train", "train")
    hidden_size, vocab_size = run.shape.hidden_size, run.shape.vocab_size
    workers, weights, adapter, gradients = run.workers_of("train"), 0.0, 0, heads.trained
    width = FP32
    if train.precision == "bf16" or (train.precision == "auto" and stage.on_gpu):
        width = 2
    if learner.tunes_backbone:
        num_positions = tuned.micro_batch * tuned.sequence_length
        weights = target.weight_bytes(tuned.quantization_beside(run.config.target.quantization))
        if tuned.shard:
            weights -= target.linear * target.itemsize * (1 - 1 / workers)
        num_layers = run.target_config.get_text_config().num_hidden_layers
        layers = KEPT_FOR_BACKWARD * num_layers
        if tuned.gradient_checkpointing:
            layers = KEPT_FOR_BACKWARD + num_layers
        activations = layers * hidden_size * num_positions * width
        adapter = tuned.lora_rank * target.adapted
        # The heads' gradients of a micro-batch lie beside the sum of the earlier ones.
        gradients = adapter + 2 * heads.trained
    else:
        recipe = learner.expected_recipe(train, positions, hidden_size, run.kind.lr_scale)
        num_positions = -(-recipe.batch_tokens // workers)
        activations = (BATCHES_AHEAD + 1) * num_positions * hidden_size * target.itemsize
        if train.soft_labels:
            activations *= 2
    matrices = heads.lm_head
    if train.soft_labels:
        matrices += vocab_size * hidden_size
    chunk = chunk_bytes_on(torch.device("cuda" if stage.on_gpu else "cpu"))
    logits = min(chunk, num_positions * vocab_size * (width + FP32))
    return replace(
        stage,
        saves_memory=(*run.kind.saves_memory, *learner.saves_memory)[:3],
        weights=weights,
        heads=FP32 * (adapter + heads.weights),
        gradients=FP32 * gradients,
        optimizer=MOMENTS[train.optimizer] * (adapter + heads.trained),
        activations=activations + width * (num_positions * heads.kept + matrices) + logits,
    )


def require_memory(run: ResolvedRun, found: Sequence[StageMemory]) -> None:
    """Refuse open stages that need more than their device has by more than the tolerance.

    Raises:
        EnvironmentFault: The sums, spelled out.
    """
    missing = [each for each in found if each.stage in run.open_stages and not each.fits()]
    if not missing:
        return
    sums: list[str] = []
    settings: dict[str, None] = {}  # each once, in order
    for each in missing:
        needed, room = each.total / GIB, (each.device_bytes or 0) / GIB
        workers = f" in each of {each.sharing} workers" if each.sharing > 1 else ""
        device = "its GPU" if each.on_gpu else "this machine"
        sums.append(f"{each.name} needs about {needed:.1f} GiB{workers}, {device} has {room:.1f}")
        settings.update(dict.fromkeys(each.saves_memory))
    fix = f"What helps most: {', '.join(settings)}."
    if not missing[0].on_gpu:
        fix += " To plan for GPUs that are elsewhere, give placement.gpu_memory_gb."
    what = f"This does not fit into memory (an estimate, ±{TOLERANCE:.0%}): {'; '.join(sums)}."
    raise EnvironmentFault(what, "placement", fix)
