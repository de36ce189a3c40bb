"""Estimate a run before it starts: tokens, disk space, and the memory of each stage's worker.

Until the generate stage has run, tokens are estimated from the longest answers that the settings
allow. Memory is computed from config.json and the settings, to within about `TOLERANCE`. The KV
cache, and memory that allocators and vLLM use besides tensors, are not counted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from pipeline.artifacts.state_format import StateFormat
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB, gpu_memory, machine_memory
from pipeline.execution.placement import Resources
from pipeline.heads.kind import Heads
from pipeline.heads.losses import chunk_bytes_on
from pipeline.run.kept_seeds import count_seed_rows
from pipeline.run.resolved import ENGINE_SECTIONS, TARGET, ResolvedRun
from pipeline.storage.receipts import Summary
from pipeline.targets.sizes import TargetSizes, parameter_counts
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.recipe import Recipe
from pipeline.training.task import Learner, product_dtype

TOLERANCE = 0.2  # of an estimate of memory
PROMPT_SHARE = 0.3  # tokens of prompts per token that the target writes: UltraChat's
MANY_POSITIONS = 10**8  # so many that a recipe has the largest batches
KEPT_FOR_BACKWARD = 36  # activations of a token in a Llama-like decoder layer, over D
KEPT_BY_MATRICES = 1.75  # activations of a position in heads: factor on their matrices' size over D
SMALLER_TARGET = (
    "target.quantization: 4bit (without vLLM)",
    "target.model: a copy in fewer bits",
)
FP32 = 4  # bytes
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2}  # bytes of a parameter's two moments


@dataclass(frozen=True)
class RunSize:
    """The estimated size of a run: conversations, tokens and optimizer steps.

    Until the generate stage has run, a conversation is assumed to have `generate.rounds` answers of
    `generate.max_new_tokens` tokens, or to fill the target's context. In self-talk and passthrough
    it may have more tokens.
    """

    conversations: int | None  # None where a data set on the Hub has no limit
    samples: int  # answers to each training prompt
    tokens: int | None  # that the target writes; each has one cached state
    bytes_per_position: int | None  # 0 where no state is cached; None if the target is unknown
    row_layers: int  # whose outputs are cached too, at every token
    is_bound: bool  # whether `tokens` is an upper bound; else it is a count
    positions: int  # to train on; 0 if unknown
    recipes: tuple[Recipe, ...]  # of the training phases; empty if unknown

    @property
    def disk_bytes(self) -> int | None:
        """The estimated bytes on disk of the cached states; None if unknown."""
        if self.tokens is None or self.bytes_per_position is None:
            return None
        return self.tokens * self.bytes_per_position + self.row_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """The estimated bytes on disk of a layer's outputs at every token; 0 if unknown."""
        return round((1 + PROMPT_SHARE) * (self.tokens or 0)) * (self.bytes_per_position or 0)


def on_planned_gpus(run: ResolvedRun) -> ResolvedRun:
    """Return the run as planned for a machine with one GPU if `placement.gpu_memory_gb` is set.

    Otherwise return it unchanged.
    """
    if run.config.placement.gpu_memory_gb is None:
        return run
    return run.on(Resources(((run.machine.cpus, 1),)))


def run_size(
    run: ResolvedRun,
    seeds: Summary | None,
    generated: Summary | None,
) -> RunSize:
    """Estimate the size of a run: its conversations, tokens, bytes per state and optimizer steps.

    If the target's configuration is not available, bytes and steps are unknown.

    Args:
        seeds: The summary of the seeds stage, or its counts before it runs; None if unknown.
        generated: The summary of the generate stage; None if unfinished.
    """
    train, generate = run.config.train, run.config.generate
    is_known = TARGET in run.models
    hidden_size = run.shape.hidden_size
    length = generate.rounds * generate.max_new_tokens
    if is_known:
        length = min(length, run.context)
    rows = int(seeds["rows"]) if seeds else None
    prompts = int(seeds.get("train_rows", 0)) if seeds else 0
    tokens, share = None, 0.0
    samples = generate.num_samples(prompts)
    if rows:
        later_samples = prompts * (samples - 1)
        tokens = (rows + later_samples) * length
        share = (prompts + later_samples) / (rows + later_samples)
    if generated:
        tokens = int(generated["tokens"])
    stored: int | None = 0
    if not is_known:
        stored = None
    elif "features" not in run.method.skipped_stages(train):
        precision = run.config.features.precision
        stored = StateFormat(run.target.torch_dtype, hidden_size, precision).stored_bytes
    positions = round((tokens or 0) * share)
    recipes = []
    if positions and is_known:
        for _, learner in run.method.phases(train):
            recipes.append(learner.expected_recipe(train, positions, hidden_size, run.kind))
    return RunSize(
        conversations=rows,
        samples=samples,
        tokens=tokens,
        bytes_per_position=stored,
        row_layers=len(run.shape.row_layers),
        is_bound=generated is None,
        positions=positions,
        recipes=tuple(recipes),
    )


def target_sizes(run: ResolvedRun) -> TargetSizes | None:
    """Return the parameter counts of the run's target.

    The result is None if the target's configuration is not available, or no model can be built from
    it.
    """
    return parameter_counts(run.target, run.target_config) if TARGET in run.models else None


@dataclass(frozen=True)
class StageMemory:
    """Estimated peak memory, in bytes, of one worker of a stage on one of its devices."""

    stage: str
    name: str  # as `plan` prints it
    device_bytes: float | None  # a GPU's, or a share of the machine's; None if unknown
    saves_memory: tuple[str, ...]  # the settings that help most
    weights: float = 0  # the target's
    heads: float = 0  # and the LoRA adapter, if one trains
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0  # states, logits and batches

    @property
    def total(self) -> float:
        """The estimated memory in bytes: the sum of all parts."""
        trained = self.heads + self.gradients + self.optimizer
        return self.weights + trained + self.activations

    def fits(self) -> bool:
        """Return whether the estimate is at most (1 + `TOLERANCE`) times the device's memory.

        If the device's memory is unknown, the result is True.
        """
        return self.device_bytes is None or self.total <= (1 + TOLERANCE) * self.device_bytes


def memory_of_stages(
    run: ResolvedRun, target: TargetSizes, positions: int = 0
) -> list[StageMemory]:
    """Estimate the memory of one worker in the generate, features, train and check stages.

    Training has one estimate per phase, and the check one per engine. In passthrough mode generate
    has no estimate. If the run skips features, tuned-features is estimated instead.

    Args:
        positions: The number of positions to train on, which decides the size of batches; 0 assumes
            the largest.
    """
    config, memory = run.config, []
    if config.generate.mode != "passthrough":
        memory.append(_decoding_memory(run, target, "generate", "generate"))
    features = "features"
    if features in run.method.skipped_stages(config.train):
        features = "tuned-features"
    memory.append(_decoding_memory(run, target, features, "features"))
    if run.shape.row_layers:
        memory.append(_decoding_memory(run, target, "row-features", "features"))
    for name, learner in run.method.phases(config.train):
        phase = _training_memory(run, target, name or "train", learner, positions or MANY_POSITIONS)
        memory.append(phase)
    heads = sum(weight.numel() for weight in heads_to_count(run, run.shape.num_heads).parameters())
    for engine in config.check.engines:
        check = _decoding_memory(run, target, "check", ENGINE_SECTIONS[engine])
        memory.append(replace(check, name=f"check, {engine}", heads=heads * target.itemsize))
    return memory


def planned_gpu_memory(run: ResolvedRun) -> float | None:
    """Return the memory of a GPU in bytes: `placement.gpu_memory_gb`, else the smallest GPU's here.

    The result is None if there is neither.
    """
    gigabytes = run.config.placement.gpu_memory_gb
    return gigabytes * GIB if gigabytes else gpu_memory()


def _device_bytes(run: ResolvedRun, stage: str, section: str) -> float | None:
    """Return the memory in bytes of a worker's device, or None if unknown.

    With GPUs it is the memory of one. Without GPUs it is a worker's share of this machine's memory;
    it is unknown if RAY_ADDRESS is set.
    """
    if run.gpus_of(section):
        return planned_gpu_memory(run)
    if os.environ.get("RAY_ADDRESS"):
        return None
    workers = 1 if stage == "check" else run.workers_of(section)
    return machine_memory() / workers


def _decoding_memory(
    run: ResolvedRun, target: TargetSizes, stage: str, section: str
) -> StageMemory:
    """Estimate the memory per device of a worker that runs the target: weights, over its GPUs."""
    gpus = max(1, run.gpus_of(section))
    return StageMemory(
        stage,
        stage,
        _device_bytes(run, stage, section),
        (f"placement.{section}.gpus_per_worker: {2 * gpus}", *SMALLER_TARGET),
        weights=target.weight_bytes(run.config.target.quantization) / gpus,
    )


def heads_to_count(run: ResolvedRun, num_heads: int) -> Heads:
    """Build `num_heads` heads on the meta device, to count their parameters."""
    shape = run.shape.drafting(run.config.train.draft_vocab)
    return run.kind(replace(shape, num_heads=num_heads), device=torch.device("meta"))


def count_trained(heads: Heads) -> int:
    """Count the trainable parameters of heads."""
    return sum(weight.numel() for weight in heads.parameters() if weight.requires_grad)


def _training_memory(
    run: ResolvedRun, target: TargetSizes, name: str, learner: type[Learner], positions: int
) -> StageMemory:
    """Estimate the peak memory of a training worker, which is reached in computing the loss.

    It holds the heads' weights, their gradients and optimizer moments, the logits of a chunk, and
    the activations of the heads. To train heads alone, it also holds the cached states of its
    batches. To tune the backbone, it also holds the backbone's weights and activations and the LoRA
    adapter.

    Args:
        name: The name of the training phase in the output.
        positions: The number of positions to train on, which decides the size of batches.
    """
    train, workers = run.config.train, run.workers_of("train")
    device = torch.device("cuda" if run.gpus_of("train") else "cpu")
    width = product_dtype(train, device).itemsize
    hidden_size = run.shape.hidden_size
    heads = heads_to_count(run, train.num_heads)
    num_trained = count_trained(heads)
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
        recipe = learner.expected_recipe(train, positions, hidden_size, run.kind)
        num_positions = -(-recipe.batch_tokens // workers)
        num_states = 1.0 + bool(train.soft_labels)  # what the teacher reads
        num_states += len(run.shape.row_layers) * (1 + PROMPT_SHARE)
        states = (BATCHES_AHEAD + 1) * num_positions * num_states * hidden_size * target.itemsize
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
    """Estimate how many numbers training holds for the heads besides their parameters.

    These are the activations for the backward pass, a copy of one head's lm_head, and with soft
    labels a copy of the target's. They have the dtype of matrix products.
    """
    one_head, hidden_size = heads_to_count(run, 1), run.shape.hidden_size
    lm_heads = one_head.lm_head.numel()
    matrices = count_trained(one_head)
    if one_head.lm_head.requires_grad:
        matrices -= lm_heads
    if run.config.train.soft_labels:
        lm_heads += run.shape.vocab_size * hidden_size  # the teacher's
    kept_by_head = KEPT_BY_MATRICES * matrices / hidden_size + hidden_size
    return num_positions * run.config.train.num_heads * kept_by_head + lm_heads


def check_memory(run: ResolvedRun) -> None:
    """Raise EnvironmentFault if an unfinished stage needs more memory than its device has.

    Estimates may exceed the device's memory by a share of `TOLERANCE`. Nothing is checked if the
    target's size is unknown.
    """
    run = on_planned_gpus(run)
    target = target_sizes(run) if run.open_stages else None
    if target is None:
        return
    memory = memory_of_stages(run, target)
    if not all(stage.fits() for stage in memory):  # counting conversations takes time
        size = run_size(run, count_seed_rows(run.config), None)
        memory = memory_of_stages(run, target, size.positions)
    for stage in memory:
        if stage.stage in run.open_stages and not stage.fits():
            room = (stage.device_bytes or 0) / GIB
            raise EnvironmentFault(
                f"{stage.name} does not fit into memory: a worker needs {stage.total / GIB:.1f} GiB"
                f" (an estimate, ±{TOLERANCE:.0%}), and its device has {room:.1f}.",
                "placement",
                f"What helps most: {', '.join(stage.saves_memory)}. To plan for another"
                " machine's GPUs, set placement.gpu_memory_gb.",
            )
