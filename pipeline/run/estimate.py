"""How large a run is, before it starts: tokens, disk, and the memory of each stage's worker.

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

from pipeline.artifacts.feature_rows import state_bytes
from pipeline.config.training import Bits
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import mixed, source_readers
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB, gpu_memory, machine_memory
from pipeline.execution.placement import Resources
from pipeline.heads.losses import chunk_bytes_on
from pipeline.run.resolved import ENGINE_SECTIONS, TARGET, ResolvedRun
from pipeline.storage.done import Summary
from pipeline.targets.spec import cached_numbers, quantization_of
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.learner import Learner
from pipeline.training.recipe import Recipe

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
    written: bool = False  # whether the tokens are there already, and counted
    assumed: str = ""  # what was assumed, as a sentence
    positions: int | None = None  # to train on, where the tokens are known or bounded
    recipes: tuple[Recipe, ...] = ()  # of training's phases, where the tokens are known or bounded

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

    Args:
        seeds, generated: The summaries of these stages, where they are done.
    """
    config, train = run.config, run.config.train
    longest, assumed = config.generate.rounds * config.generate.max_new_tokens, ""
    if TARGET in run.models:
        hidden_size, dtype = run.shape.hidden_size, getattr(torch, run.target.dtype)
        longest = min(longest, run.context)
    else:
        hidden_size, dtype = ASSUMED_HIDDEN_SIZE, torch.bfloat16
        assumed = (
            f"{run.problems[TARGET].what} So states of {hidden_size:,} numbers in 16 bits are"
            " assumed, as 7B models have them."
        )
    rows = int(seeds["rows"]) if seeds else _count_conversations(run)
    tokens = None if rows is None else rows * longest
    if generated:
        tokens = int(generated.get("tokens", 0))
    stored = 0
    if "features" not in run.method.skipped(train):
        stored = state_bytes(hidden_size, dtype, config.features.precision)
    train_share = 1 - config.seeds.holdout
    if seeds and seeds["rows"]:
        train_share = seeds["train_rows"] / seeds["rows"]
    positions, recipes = round((tokens or 0) * train_share), []
    if positions:
        for _, learner in run.method.phases(train):
            recipes.append(
                learner.expected_recipe(train, positions, hidden_size, run.kind.lr_scale)
            )
    return RunSize(
        rows, tokens, stored, bool(generated), assumed, positions or None, tuple(recipes)
    )


def _count_conversations(run: ResolvedRun) -> int | None:
    """The conversations in local files, and as many of the Hub's as their limits allow."""
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
    """A target in numbers (not bytes) where nothing else is said."""

    parameters: int  # tied ones once
    linear: int  # of the linear layers but lm_head: what quantization makes smaller
    adapted: int  # inputs and outputs of these layers: LoRA's parameters per rank
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    cached: int  # keys and values of one token
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
    spec = run.target
    itemsize = getattr(torch, spec.dtype).itemsize
    stored_bits = 8 * itemsize
    settings = copy.deepcopy(run.target_config)
    text, quantization = settings.get_text_config(), quantization_of(settings)
    if quantization:
        is_four_bits = any(said in str(quantization) for said in FOUR_BITS)
        stored_bits = 4 if is_four_bits else 8
        del settings.quantization_config
    try:
        with torch.device("meta"):  # where parameters have shapes and take no memory
            model = AutoModelForCausalLM.from_config(
                settings, trust_remote_code=spec.trust_remote_code
            )
    except Exception:  # any error of a family's own code
        return None
    lm_head = model.get_output_embeddings()
    linear = []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not lm_head:
            linear.append(layer.weight)
    return TargetSizes(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(weight.numel() for weight in linear),
        adapted=sum(sum(weight.shape) for weight in linear),
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        cached=cached_numbers(settings),
        itemsize=itemsize,
        stored_bits=stored_bits,
    )


@dataclass(frozen=True)
class HeadsSizes:
    """A set of heads in numbers (not bytes)."""

    weights: int
    trained: int
    lm_head: int  # of one head
    kept: float  # of a position, for backward


def heads_sizes(run: ResolvedRun) -> HeadsSizes:
    shape, meta = run.shape.drafting(run.config.train.draft_vocab), torch.device("meta")
    heads = run.kind(shape, device=meta)
    trained = sum(weight.numel() for weight in heads.parameters() if weight.requires_grad)
    one_head = run.kind(replace(shape, num_heads=1), device=meta)
    matrices = sum(weight.numel() for weight in one_head.parameters() if weight.requires_grad)
    if heads.lm_head.requires_grad:
        matrices -= one_head.lm_head.numel()
    return HeadsSizes(
        weights=sum(weight.numel() for weight in heads.parameters()),
        trained=trained,
        lm_head=shape.vocab_size * shape.hidden_size,
        kept=shape.num_heads
        * (KEPT_BY_MATRICES * matrices / shape.hidden_size + shape.hidden_size),
    )


@dataclass(frozen=True)
class Device:
    """One device of one worker."""

    num_bytes: float | None  # None where it is not known from here
    is_gpu: bool
    workers: int  # of the stage
    sharing: int  # workers on one device: without GPUs, all of the machine's


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one worker of a stage holds on one of its devices at its peak."""

    name: str  # as `plan` prints it
    stage: str
    device: Device
    saves_memory: tuple[str, ...]  # settings
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
        """Whether it fits on a device that is larger by the tolerance."""
        if self.device.num_bytes is None:
            return True
        return self.total * self.device.sharing <= (1 + tolerance) * self.device.num_bytes


def memory_of_stages(
    run: ResolvedRun, target: TargetSizes, positions: int | None = None
) -> list[StageMemory]:
    """The memory of every stage that needs much.

    Args:
        positions: To train on; without them batches are the largest that the recipe makes.
    """
    config, heads, found = run.config, heads_sizes(run), []
    if config.generate.mode != "passthrough":
        found.append(_decoding(run, target, "generate", "generate", num_texts=1))
    features = "features"
    if features in run.method.skipped(config.train):
        features = "tuned-features"
    found.append(_decoding(run, target, features, "features", num_texts=0))
    for name, learner in run.method.phases(config.train):
        phase = _training(run, target, heads, learner, positions or MANY_POSITIONS)
        found.append(replace(phase, name=name or "train"))
    for engine in config.check.engines:
        check = _decoding(run, target, "check", ENGINE_SECTIONS[engine], num_texts=2)
        found.append(replace(check, name=f"check, {engine}", heads=heads.weights * target.itemsize))
    return found


def _device(run: ResolvedRun, section: str) -> Device:
    """The device of each worker that a section of `placement` places."""
    gpus, wanted = run.gpus_of(section), run.config.placement.of_stages()[section].workers
    is_elsewhere = os.environ.get("RAY_ADDRESS")
    workers = 1
    if wanted != "auto":
        workers = wanted
    elif not is_elsewhere:
        workers = max(1, run.machine.gpus // max(1, gpus))
    if gpus:
        gigabytes = run.config.placement.gpu_memory_gb
        return Device(gigabytes * GIB if gigabytes else gpu_memory(), True, workers, 1)
    return Device(None if is_elsewhere else machine_memory(), False, workers, workers)


def _decoding(
    run: ResolvedRun, target: TargetSizes, stage: str, section: str, num_texts: int
) -> StageMemory:
    """A stage that runs the target without gradients and caches so many conversations."""
    gpus, device = max(1, run.gpus_of(section)), _device(run, section)
    if stage == "check":
        device = replace(device, sharing=1)
    return StageMemory(
        stage,
        stage,
        device,
        (
            f"placement.{section}.gpus_per_worker: {2 * gpus}",
            "target.quantization: 4bit (without vLLM)",
            "target.model: a copy in fewer bits",
        ),
        weights=target.weight_bytes(run.config.target.quantization) / gpus,
        activations=HELD_IN_FORWARD * FORWARD_TOKENS * target.hidden_size * target.itemsize,
        cache=num_texts * FORWARD_TOKENS * target.cached * target.itemsize / gpus,
    )


def _training(
    run: ResolvedRun,
    target: TargetSizes,
    heads: HeadsSizes,
    learner: type[Learner],
    positions: int,
) -> StageMemory:
    """A step of training, at its peak in the loss."""
    train, tuned, device = run.config.train, run.config.train.backbone, _device(run, "train")
    width = FP32
    if train.precision == "bf16" or (train.precision == "auto" and device.is_gpu):
        width = 2
    weights, adapter, gradients = 0.0, 0, heads.trained
    if learner.tunes_backbone:
        num_positions = tuned.micro_batch * tuned.sequence_length
        weights = target.weight_bytes(tuned.quantization_beside(run.config.target.quantization))
        if tuned.shard:
            weights -= target.linear * target.itemsize * (1 - 1 / device.workers)
        adapter = tuned.lora_rank * target.adapted
        layers = KEPT_FOR_BACKWARD * target.num_hidden_layers
        if tuned.gradient_checkpointing:
            layers = KEPT_FOR_BACKWARD + target.num_hidden_layers
        activations = layers * target.hidden_size * num_positions * width
        # The heads' gradients of a micro-batch lie beside the sum of the earlier ones.
        gradients = adapter + 2 * heads.trained
    else:
        recipe = learner.expected_recipe(train, positions, target.hidden_size, run.kind.lr_scale)
        num_positions = -(-recipe.batch_tokens // device.workers)
        batch = num_positions * target.hidden_size * target.itemsize
        if train.soft_labels:
            batch *= 2
        activations = (BATCHES_AHEAD + 1) * batch
    matrices = heads.lm_head
    if train.soft_labels:
        matrices += target.vocab_size * target.hidden_size
    chunk = chunk_bytes_on(torch.device("cuda" if device.is_gpu else "cpu"))
    logits = min(chunk, num_positions * target.vocab_size * (width + FP32))
    return StageMemory(
        "train",
        "train",
        device,
        (*run.kind.saves_memory, *learner.saves_memory)[:3],
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
        device = "its GPU" if each.device.is_gpu else "this machine"
        sharing = each.device.sharing
        workers = f" in each of {sharing} workers" if sharing > 1 else ""
        room = (each.device.num_bytes or 0) / GIB
        sums.append(
            f"{each.name} needs about {each.total / GIB:.1f} GiB{workers}, {device} has {room:.1f}"
        )
        settings |= dict.fromkeys(each.saves_memory)
    fix = f"What helps most: {', '.join(settings)}."
    if not missing[0].device.is_gpu:
        fix += " To plan for GPUs that are elsewhere, give placement.gpu_memory_gb."
    raise EnvironmentFault(
        f"This does not fit into memory, by an estimate that is ±{TOLERANCE:.0%}:"
        f" {'; '.join(sums)}.",
        "placement",
        fix,
    )
