"""Estimate a run before it starts: tokens, disk, and the memory of each stage's worker.

Tokens are upper bounds until `generate` has counted them. Memory is arithmetic on config.json and
settings, good to about `TOLERANCE`: what allocators and vLLM hold beside tensors is not counted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import mix_sources, source_readers
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB, gpu_memory, machine_memory
from pipeline.execution.placement import Resources
from pipeline.heads.kind import Heads
from pipeline.heads.losses import chunk_bytes_on
from pipeline.run.resolved import ENGINE_SECTIONS, TARGET, ResolvedRun
from pipeline.storage.receipts import Summary
from pipeline.targets.sizes import TargetSizes, parameter_counts
from pipeline.targets.spec import cached_numbers
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.recipe import Recipe
from pipeline.training.task import Learner, product_dtype

TOLERANCE = 0.2  # of an estimate of memory
ASSUMED_HIDDEN_SIZE = 4096  # a 7B model's, while the target cannot be looked up
MANY_POSITIONS = 10**8  # makes the largest batches of a recipe
CACHED_TOKENS = 4096  # of a conversation
KEPT_FOR_BACKWARD = 36  # numbers of a token in a Llama-like decoder layer, over the hidden size
KEPT_BY_MATRICES = 1.75  # numbers that heads keep of a position, times their matrices' size over D
SMALLER_TARGET = (
    "target.quantization: 4bit (without vLLM)",
    "target.model: a copy in fewer bits",
)
FP32 = 4  # bytes
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2}  # bytes of a parameter's two moments


@dataclass(frozen=True)
class RunSize:
    """The estimated size of a run: conversations, tokens and optimizer steps.

    Until generate has run, every answer is counted as long as it may be. Real rows are usually
    shorter; in self-talk and passthrough they may be longer.
    """

    conversations: int | None  # None where a data set on the Hub has no limit
    tokens: int | None  # to write, and to cache a state of each
    tokens_per_sample: int  # that a further sample of every training prompt would add
    bytes_per_position: int  # 0 where no state is cached
    written: bool  # whether the tokens are there already, and counted
    positions: int  # to train on; 0 while unknown
    recipes: tuple[Recipe, ...]  # of training's phases; empty while tokens are unknown

    @property
    def disk_bytes(self) -> int | None:
        """The estimated bytes on disk of the run's cached states; None while unknown."""
        return None if self.tokens is None else self.tokens * self.bytes_per_position


def on_planned_gpus(run: ResolvedRun) -> ResolvedRun:
    """Return the run as if on one GPU, to estimate it, if `placement.gpu_memory_gb` is set."""
    if run.config.placement.gpu_memory_gb is None:
        return run
    return run.on(Resources(((run.machine.cpus, 1),)))


def run_size(run: ResolvedRun, seeds: Summary | None, generated: Summary | None) -> RunSize:
    """Estimate the size of a run: its tokens, bytes per cached state and optimizer steps.

    Until generate has run, every answer is counted as long as it may be. For a target that cannot
    be reached now, states of a 7B model's size are assumed.

    Args:
        seeds, generated: The summaries of these stages, where they are done.
    """
    train, generate = run.config.train, run.config.generate
    hidden_size, dtype = ASSUMED_HIDDEN_SIZE, torch.bfloat16
    longest = generate.rounds * generate.max_new_tokens
    if TARGET in run.models:
        hidden_size, dtype = run.shape.hidden_size, getattr(torch, run.target.dtype)
        longest = min(longest, run.context)
    rows = int(seeds["rows"]) if seeds else _count_conversations(run)
    share = 1 - run.config.seeds.holdout
    if seeds and rows:
        share = seeds["train_rows"] / rows
    tokens = None
    prompts = round((rows or 0) * share)
    if rows is not None:
        later_samples = prompts * (generate.num_samples(prompts) - 1)
        tokens = (rows + later_samples) * longest
        share = (prompts + later_samples) / max(1, rows + later_samples)
    if generated:
        tokens = int(generated["tokens"])
    stored = 0
    if "features" not in run.method.skipped_stages(train):
        stored = StateFormat(dtype, hidden_size, run.config.features.precision).stored_bytes
    positions = round((tokens or 0) * share)
    recipes = []
    if positions:
        for _, learner in run.method.phases(train):
            scale = run.kind.lr_scale
            recipes.append(learner.expected_recipe(train, positions, hidden_size, scale))
    return RunSize(
        conversations=rows,
        tokens=tokens,
        tokens_per_sample=prompts * longest,
        bytes_per_position=stored,
        written=bool(generated),
        positions=positions,
        recipes=tuple(recipes),
    )


def _count_conversations(run: ResolvedRun) -> int | None:
    """Estimate the run's conversations: those in local files, and the limits of Hub data sets.

    The local files are read. The result is None if a Hub data set has no limit.
    """
    count, local = 0, []
    for reader in source_readers(run.config.seeds):
        if reader.source.path:
            local.append(reader)
        elif reader.source.limit is None:
            return None
        else:
            count += reader.source.limit
    return count + sum(isinstance(row, Conversation) for row in mix_sources(local))


def target_sizes(run: ResolvedRun) -> TargetSizes | None:
    """Count the target's parameters for the estimate of a run.

    The result is None if the target is not there or its config.json is not enough.
    """
    return parameter_counts(run.target, run.target_config) if TARGET in run.models else None


@dataclass(frozen=True)
class StageMemory:
    """Estimated peak memory, in bytes, of one worker of a stage on one of its devices."""

    stage: str
    name: str  # as `plan` prints it
    device_bytes: float | None  # without GPUs a share of the machine; None: unknown
    saves_memory: tuple[str, ...]  # the settings that help most
    weights: float = 0  # the target's
    heads: float = 0  # with the adapter, where one trains
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0  # states, logits and batches
    cache: float = 0  # keys and values

    @property
    def total(self) -> float:
        """The estimated memory of a stage's worker in bytes."""
        trained = self.heads + self.gradients + self.optimizer
        return self.weights + trained + self.activations + self.cache

    def fits(self, tolerance: float = TOLERANCE) -> bool:
        """Return whether the estimated memory is at most the device's times 1 + `tolerance`.

        It fits a device whose memory is unknown.
        """
        return self.device_bytes is None or self.total <= (1 + tolerance) * self.device_bytes


def memory_of_stages(
    run: ResolvedRun, target: TargetSizes, positions: int = 0
) -> list[StageMemory]:
    """Estimate one worker's memory in the run's generate, features, train and check stages.

    Training has one estimate for each phase, and the check one for each engine.

    Args:
        positions: The number to train on; with 0, batches are the largest that the recipe makes.
    """
    config, memory = run.config, []
    if config.generate.mode != "passthrough":
        memory.append(_decoding_memory(run, target, "generate", "generate", num_texts=1))
    features = "features"
    if features in run.method.skipped_stages(config.train):
        features = "tuned-features"
    memory.append(_decoding_memory(run, target, features, "features", num_texts=0))
    for name, learner in run.method.phases(config.train):
        phase = _training_memory(run, target, name or "train", learner, positions or MANY_POSITIONS)
        memory.append(phase)
    heads = sum(weight.numel() for weight in _heads_to_count(run, run.shape.num_heads).parameters())
    for engine in config.check.engines:
        check = _decoding_memory(run, target, "check", ENGINE_SECTIONS[engine], num_texts=2)
        memory.append(replace(check, name=f"check, {engine}", heads=heads * target.itemsize))
    return memory


def _device_bytes(run: ResolvedRun, stage: str, section: str) -> float | None:
    """Return the memory of the device to compare an estimate with; None if it is not known here."""
    if run.gpus_of(section):
        gigabytes = run.config.placement.gpu_memory_gb
        return gigabytes * GIB if gigabytes else gpu_memory()
    if os.environ.get("RAY_ADDRESS"):
        return None
    workers = 1 if stage == "check" else run.workers_of(section)
    return machine_memory() / workers


def _decoding_memory(
    run: ResolvedRun, target: TargetSizes, stage: str, section: str, num_texts: int
) -> StageMemory:
    """Estimate the memory of a stage that runs the target and caches `num_texts` texts."""
    gpus = max(1, run.gpus_of(section))
    cached = num_texts * CACHED_TOKENS * cached_numbers(run.target_config)
    return StageMemory(
        stage,
        stage,
        _device_bytes(run, stage, section),
        (f"placement.{section}.gpus_per_worker: {2 * gpus}", *SMALLER_TARGET),
        weights=target.weight_bytes(run.config.target.quantization) / gpus,
        cache=cached * target.itemsize / gpus,
    )


def _heads_to_count(run: ResolvedRun, num_heads: int) -> Heads:
    """Build `num_heads` heads on the meta device, to count their memory in an estimate."""
    shape = run.shape.drafting(run.config.train.draft_vocab)
    return run.kind(replace(shape, num_heads=num_heads), device=torch.device("meta"))


def _num_trained(heads: Heads) -> int:
    """Count the parameters that train, for the estimate of a run's memory."""
    return sum(weight.numel() for weight in heads.parameters() if weight.requires_grad)


def _training_memory(
    run: ResolvedRun, target: TargetSizes, name: str, learner: type[Learner], positions: int
) -> StageMemory:
    """Estimate the memory of the run's training at its peak, while the loss is computed.

    A worker holds the weights, gradients and moments of the heads in fp32; the states of its
    positions, cached ones or those that the layers of the backbone keep; and the numbers that the
    heads and the loss compute from these.
    """
    train, workers = run.config.train, run.workers_of("train")
    device = torch.device("cuda" if run.gpus_of("train") else "cpu")
    width = product_dtype(train, device).itemsize
    hidden_size = run.shape.hidden_size
    heads = _heads_to_count(run, train.num_heads)
    num_trained = _num_trained(heads)
    weights, num_adapter, num_gradients = 0.0, 0, num_trained
    if learner.tunes_backbone:
        backbone = train.backbone
        num_positions = backbone.micro_batch * backbone.sequence_length
        num_layers = run.target_config.get_text_config().num_hidden_layers
        kept_by_layers = KEPT_FOR_BACKWARD * num_layers
        if backbone.gradient_checkpointing:  # one layer's numbers, and the input of each
            kept_by_layers = KEPT_FOR_BACKWARD + num_layers
        states = num_positions * kept_by_layers * hidden_size * width
        weights = target.weight_bytes(backbone.quantization_beside(run.config.target.quantization))
        if backbone.shard:
            weights -= target.linear * target.itemsize * (1 - 1 / workers)
        num_adapter = backbone.lora_rank * target.adapted
        # The heads' gradients of a micro-batch lie beside the sum of the earlier ones.
        num_gradients = num_adapter + 2 * num_trained
    else:
        recipe = learner.expected_recipe(train, positions, hidden_size, run.kind.lr_scale)
        num_positions = -(-recipe.batch_tokens // workers)
        states = (BATCHES_AHEAD + 1) * num_positions * hidden_size * target.itemsize
        if train.soft_labels:
            states *= 2  # those that the teacher reads
    logits = min(chunk_bytes_on(device), num_positions * run.shape.vocab_size * (width + FP32))
    num_weights = sum(weight.numel() for weight in heads.parameters())
    return StageMemory(
        "train",
        name,
        _device_bytes(run, "train", "train"),
        (*run.kind.saves_memory, *learner.saves_memory)[:3],
        weights=weights,
        heads=FP32 * (num_adapter + num_weights),
        gradients=FP32 * num_gradients,
        optimizer=MOMENTS[train.optimizer] * (num_adapter + num_trained),
        activations=states + width * _kept_by_heads(run, num_positions) + logits,
    )


def _kept_by_heads(run: ResolvedRun, num_positions: int) -> float:
    """Estimate how many numbers training holds for the heads' backward pass and as lm_heads."""
    one_head, hidden_size = _heads_to_count(run, 1), run.shape.hidden_size
    lm_heads = one_head.lm_head.numel()
    matrices = _num_trained(one_head)
    if one_head.lm_head.requires_grad:
        matrices -= lm_heads
    if run.config.train.soft_labels:
        lm_heads += run.shape.vocab_size * hidden_size  # the teacher's
    kept_by_head = KEPT_BY_MATRICES * matrices / hidden_size + hidden_size
    return num_positions * run.config.train.num_heads * kept_by_head + lm_heads


def check_memory(run: ResolvedRun) -> None:
    """Refuse to start a run with an unfinished stage whose estimated memory exceeds its device's.

    An excess of up to `TOLERANCE` is allowed. Nothing is checked if the target's size is unknown.

    Raises:
        EnvironmentFault: A stage does not fit.
    """
    run = on_planned_gpus(run)
    target = target_sizes(run) if run.open_stages else None
    if target is None:
        return
    memory = memory_of_stages(run, target)
    if not all(stage.fits() for stage in memory):  # conversations are counted only then
        memory = memory_of_stages(run, target, run_size(run, None, None).positions)
    for stage in memory:
        if stage.stage in run.open_stages and not stage.fits():
            room = (stage.device_bytes or 0) / GIB
            raise EnvironmentFault(
                f"{stage.name} does not fit into memory: a worker needs {stage.total / GIB:.1f} GiB"
                f" (an estimate, ±{TOLERANCE:.0%}), and there are {room:.1f}.",
                "placement",
                f"What helps most: {', '.join(stage.saves_memory)}. To plan for GPUs that are"
                " elsewhere, give placement.gpu_memory_gb.",
            )
