"""How large a run is, before it starts: tokens, disk, and the memory of each stage's worker.

Tokens are upper bounds until `generate` has counted them. Memory is arithmetic on config.json and
settings, good to about `TOLERANCE`: what allocators and vLLM hold beside tensors is not in it.

Letters: N positions of a micro-batch on one worker, K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from pipeline.artifacts.feature_rows import state_bytes
from pipeline.config import Config, TrainConfig
from pipeline.config.training import Bits
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import mixed, source_readers
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB, gpu_memory, machine_memory, num_gpus
from pipeline.heads.kinds import head_kind
from pipeline.heads.losses import chunk_bytes_on
from pipeline.run.placements import OF_ENGINE, unfinished
from pipeline.storage.done import Summary
from pipeline.targets.spec import (
    cached_numbers,
    context_length,
    model_config,
    quantization_of,
    resolve,
)
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.learner import Learner
from pipeline.training.methods import method_of
from pipeline.training.recipe import Recipe

TOLERANCE = 0.2  # of an estimate of memory
ASSUMED_HIDDEN_SIZE = 4096  # a 7B model's, while the target cannot be looked up
MANY_POSITIONS = (
    10**8
)  # where their number is not known: batches are then the largest that the recipe makes
FORWARD_TOKENS = 4096  # of a conversation, and of a forward
HELD_IN_FORWARD = (
    14  # numbers of a token in a decoder layer of Llama's proportions, in multiples of D
)
KEPT_FOR_BACKWARD = 36
KEPT_BY_MATRICES = (
    1.75  # numbers that the heads keep of a position for backward, times matrices' numbers over D
)
FP32 = 4  # bytes
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2}  # bytes of a parameter's two moments
BITS: dict[Bits, int] = {"8bit": 8, "4bit": 4}
FOUR_BITS = (
    "'num_bits': 4",
    "'bits': 4",
    "'w_bit': 4",
    "'load_in_4bit': True",
)  # in a checkpoint's settings


@dataclass(frozen=True)
class RunSize:
    """Upper bounds: every answer as long as it may be, until generate has run and the true counts
    are known.
    """

    conversations: int | None  # None where only reading a data set on the Hub would tell
    tokens: int | None  # to write, and to cache a state of each
    bytes_per_position: int  # 0 where no state is cached
    written: bool = False  # whether the tokens are there already, and counted
    assumed: str = ""  # what was assumed, as a sentence
    positions: int | None = None  # to train on, where the tokens are known or bounded
    recipes: tuple[Recipe, ...] = ()  # of training's phases, where the tokens are known or bounded

    @property
    def disk_bytes(self) -> int | None:
        return None if self.tokens is None else self.tokens * self.bytes_per_position


def run_size(config: Config, seeds: Summary | None, generated: Summary | None) -> RunSize:
    """Tokens to write and to cache, and the bytes of each.

    Args:
        seeds, generated: The summaries of these stages, where they are done.
    """
    method, train = method_of(config.train), config.train
    longest, assumed = config.generate.rounds * config.generate.max_new_tokens, ""
    try:
        spec = resolve(config.target, on_gpu=gpus_of(config, "features") > 0)
        hidden_size, dtype = (
            model_config(spec).get_text_config().hidden_size,
            getattr(torch, spec.dtype),
        )
        longest = min(longest, context_length(spec))
    except EnvironmentFault as error:
        hidden_size, dtype = ASSUMED_HIDDEN_SIZE, torch.bfloat16
        assumed = (
            f"{error.what} So states of {hidden_size:,} numbers in 16 bits are assumed, as 7B"
            " models have them."
        )
    rows = int(seeds["rows"]) if seeds else _count_conversations(config)
    tokens = None if rows is None else rows * longest
    if generated:
        tokens = int(generated.get("tokens", 0))
    stored = 0
    if "features" not in method.skipped(train):
        stored = state_bytes(hidden_size, dtype, config.features.precision)
    train_share = 1 - config.seeds.holdout
    if seeds and seeds["rows"]:
        train_share = seeds["train_rows"] / seeds["rows"]
    positions, recipes = round((tokens or 0) * train_share), []
    for _, learner in method.phases(train) if positions else ():
        recipes.append(
            learner.expected_recipe(train, positions, hidden_size, head_kind(train.heads).lr_scale)
        )
    return RunSize(
        rows, tokens, stored, bool(generated), assumed, positions or None, tuple(recipes)
    )


def _count_conversations(config: Config) -> int | None:
    """The conversations in local files, and those that limits allow of the Hub's."""
    count, local = 0, []
    for reader in source_readers(config.seeds):
        if reader.source.path:
            local.append(reader)
        elif reader.source.limit is None:
            return None
        else:
            count += reader.source.limit
    return count + sum(isinstance(row, Conversation) for row in mixed(local))


def gpus_of(config: Config, section: str) -> int:
    """The GPUs of each worker that a section of `placement` places, as far as that is known
    here.
    """
    wanted = config.placement.of_stages()[section].gpus_per_worker
    if wanted is not None:
        return wanted
    return int(bool(config.placement.gpu_memory_gb or num_gpus()))


def _workers_of(config: Config, section: str) -> int:
    """As many workers as are asked for; `auto` is as many as this machine's GPUs have room for."""
    wanted = config.placement.of_stages()[section].workers
    if wanted != "auto":
        return wanted
    if config.placement.gpu_memory_gb or os.environ.get(
        "RAY_ADDRESS"
    ):  # whose GPUs are not counted here
        return 1
    return max(1, num_gpus() // max(1, gpus_of(config, section)))


def _device_bytes(config: Config, section: str) -> float | None:
    """The memory of a worker's GPU, or of this machine; None where it is not known from here."""
    if gpus_of(config, section) == 0:
        return None if os.environ.get("RAY_ADDRESS") else machine_memory()
    if config.placement.gpu_memory_gb:
        return config.placement.gpu_memory_gb * GIB
    return gpu_memory()


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
    stored_bits: int | None  # of a linear layer's number, in a checkpoint that is quantized already

    def weight_bytes(self, quantization: Bits | None = None) -> float:
        """All weights as they are loaded; `quantization` is bitsandbytes', on loading."""
        bits = self.stored_bits or 8 * self.itemsize
        if quantization:
            bits = BITS[quantization]
        return (self.parameters - self.linear) * self.itemsize + self.linear * bits / 8


def target_sizes(config: Config) -> TargetSizes | None:
    """The sizes of the configured target, in its workers' dtype; None of a model whose code needs
    its weights.

    Raises:
        ConfigError, EnvironmentFault: Its configuration cannot be read.
    """
    from transformers import AutoModelForCausalLM

    spec = resolve(config.target, on_gpu=gpus_of(config, "features") > 0)
    model_settings, stored_bits = model_config(spec), None
    text, quantization = model_settings.get_text_config(), quantization_of(model_settings)
    if quantization:
        stored_bits = 4 if any(said in str(quantization) for said in FOUR_BITS) else 8
        del model_settings.quantization_config
    try:
        with torch.device("meta"):  # where parameters have shapes and take no memory
            model = AutoModelForCausalLM.from_config(
                model_settings, trust_remote_code=spec.trust_remote_code
            )
    except Exception:  # whatever a family's code raises where there are no numbers
        return None
    lm_head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    linear = [layer.weight for layer in layers if layer is not lm_head]
    return TargetSizes(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(weight.numel() for weight in linear),
        adapted=sum(sum(weight.shape) for weight in linear),
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        cached=cached_numbers(model_settings),
        itemsize=getattr(torch, spec.dtype).itemsize,
        stored_bits=stored_bits,
    )


@dataclass(frozen=True)
class HeadsSizes:
    """A set of heads in numbers (not bytes)."""

    weights: int
    trained: int
    lm_head: int  # of one
    kept: float  # of a position, for backward

    @classmethod
    def of(cls, train: TrainConfig, hidden_size: int, vocab_size: int) -> HeadsSizes:
        kind, meta = head_kind(train.heads), torch.device("meta")
        shape = kind.shape_of(train, hidden_size, vocab_size).drafting(train.draft_vocab)
        heads, one_head = kind(shape, device=meta), kind(replace(shape, num_heads=1), device=meta)
        trained = [weight.numel() for weight in heads.parameters() if weight.requires_grad]
        matrices = sum(weight.numel() for weight in one_head.parameters() if weight.requires_grad)
        if heads.lm_head.requires_grad:
            matrices -= one_head.lm_head.numel()
        kept = shape.num_heads * (KEPT_BY_MATRICES * matrices / hidden_size + hidden_size)
        weights = sum(weight.numel() for weight in heads.parameters())
        return cls(weights, sum(trained), shape.vocab_size * hidden_size, kept)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one worker of a stage holds on one of its devices at its peak."""

    name: str  # as `plan` has it
    stage: str  # of the flow
    device_bytes: float | None  # None where it is not known from here
    on_gpu: bool
    sharing: int  # workers on one device: without GPUs, all of the machine's
    saves_memory: tuple[str, ...]  # the settings that help most
    weights: float = 0  # the target's
    heads: float = 0  # with the adapter, where one trains
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0  # states, logits and batches
    cache: float = 0  # keys and values

    @property
    def total(self) -> float:
        return (
            self.weights
            + self.heads
            + self.gradients
            + self.optimizer
            + self.activations
            + self.cache
        )

    def fits(self, tolerance: float = TOLERANCE) -> bool:
        """Whether it would fit on a device that is larger by the tolerance, or smaller where that
        is negative.
        """
        return (
            self.device_bytes is None
            or self.total * self.sharing <= (1 + tolerance) * self.device_bytes
        )


def memory_of_stages(
    config: Config, target: TargetSizes, positions: int | None = None
) -> list[StageMemory]:
    """The memory of every stage that needs much.

    Args:
        positions: To train on, where their number is known.
    """
    method, found = method_of(config.train), []
    heads = HeadsSizes.of(config.train, target.hidden_size, target.vocab_size)
    if config.generate.mode != "passthrough":
        found.append(_decoding(config, target, "generate", "generate", num_texts=1))
    features = "features"
    if features in method.skipped(config.train):
        features = "tuned-features"
    found.append(_decoding(config, target, features, "features", num_texts=0))
    for name, learner in method.phases(config.train):
        found.append(_training(config, target, heads, name, learner, positions or MANY_POSITIONS))
    for engine in config.check.engines:
        check = _decoding(config, target, "check", OF_ENGINE[engine], num_texts=2)
        found.append(replace(check, name=f"check, {engine}", heads=heads.weights * target.itemsize))
    return found


def _on(stage: str, config: Config, section: str) -> StageMemory:
    """A stage that holds nothing yet, with the device of its section of `placement`."""
    on_gpu = gpus_of(config, section) > 0
    sharing = 1
    if not on_gpu and stage != "check":
        sharing = _workers_of(config, section)
    saves_memory = head_kind(config.train.heads).saves_memory
    return StageMemory(stage, stage, _device_bytes(config, section), on_gpu, sharing, saves_memory)


def _decoding(
    config: Config, target: TargetSizes, stage: str, section: str, num_texts: int
) -> StageMemory:
    """A stage that runs the target without gradients, with the keys and values of so many
    conversations.
    """
    gpus = max(1, gpus_of(config, section))
    saves_memory = (
        f"placement.{section}.gpus_per_worker: {2 * gpus}",
        "target.quantization: 4bit (without vLLM)",
        "target.model: a copy in fewer bits",
    )
    return replace(
        _on(stage, config, section),
        saves_memory=saves_memory,
        weights=target.weight_bytes(config.target.quantization) / gpus,
        activations=HELD_IN_FORWARD * FORWARD_TOKENS * target.hidden_size * target.itemsize,
        cache=num_texts * FORWARD_TOKENS * target.cached * target.itemsize / gpus,
    )


def _training(
    config: Config,
    target: TargetSizes,
    heads: HeadsSizes,
    name: str,
    learner: type[Learner],
    positions: int,
) -> StageMemory:
    """A step of training, at its peak in the loss."""
    train, workers, hidden_size = config.train, _workers_of(config, "train"), target.hidden_size
    on = _on("train", config, "train")
    width, gradients = FP32, FP32 * heads.trained
    if train.precision == "bf16" or (train.precision == "auto" and on.on_gpu):
        width = 2
    if learner.tunes_backbone:
        num_positions = train.backbone.micro_batch * train.backbone.sequence_length
        on = _with_backbone(on, config, target, num_positions * width)
        gradients *= 2  # those of a micro-batch, beside the sum of the ones before
    else:
        recipe = learner.expected_recipe(
            train, positions, hidden_size, head_kind(train.heads).lr_scale
        )
        num_positions = -(-recipe.batch_tokens // workers)
        batch = num_positions * hidden_size * target.itemsize
        if train.soft_labels:
            batch *= 2
        on = replace(on, activations=(BATCHES_AHEAD + 1) * batch)
    matrices = heads.lm_head
    if train.soft_labels:
        matrices += target.vocab_size * hidden_size
    chunk = chunk_bytes_on(torch.device("cuda" if on.on_gpu else "cpu"))
    logits = min(chunk, num_positions * target.vocab_size * (width + FP32))
    return replace(
        on,
        name=name or "train",
        saves_memory=(*on.saves_memory, *learner.saves_memory),
        heads=on.heads + FP32 * heads.weights,
        gradients=on.gradients + gradients,
        optimizer=on.optimizer + MOMENTS[train.optimizer] * heads.trained,
        activations=on.activations + width * (num_positions * heads.kept + matrices) + logits,
    )


def _with_backbone(
    on: StageMemory, config: Config, target: TargetSizes, row_bytes: float
) -> StageMemory:
    """The backbone that trains along, its adapter, and what its layers keep of rows of so many
    bytes per number.
    """
    tuned = config.train.backbone
    weights = target.weight_bytes(tuned.quantization_beside(config.target.quantization))
    if tuned.shard:
        weights -= target.linear * target.itemsize * (1 - 1 / _workers_of(config, "train"))
    adapter = tuned.lora_rank * target.adapted
    layers = KEPT_FOR_BACKWARD * target.num_hidden_layers
    if tuned.gradient_checkpointing:
        layers = KEPT_FOR_BACKWARD + target.num_hidden_layers
    return replace(
        on,
        weights=weights,
        heads=FP32 * adapter,
        gradients=FP32 * adapter,
        optimizer=MOMENTS[config.train.optimizer] * adapter,
        activations=layers * target.hidden_size * row_bytes,
    )


def check_memory(
    config: Config,
    stages: Collection[str],
    fresh: str | None = None,
    count_positions: Callable[[], int | None] = lambda: None,
) -> None:
    """Refuse a run of which a stage cannot fit into memory, as far as that is known here.

    A stage with a finished result in the store is not checked, since it may be kept, except
    `fresh`.

    Args:
        count_positions: Counts those to train on; called only where the largest batches would not
            fit.

    Raises:
        EnvironmentFault: See `require_memory`.
    """
    left = unfinished(config, stages, fresh)
    target = target_sizes(config) if left else None
    if target is None:
        return
    found = [each for each in memory_of_stages(config, target) if each.stage in left]
    if not all(each.fits() for each in found):
        again = memory_of_stages(config, target, count_positions())
        require_memory([each for each in again if each.stage in left])


def require_memory(found: Collection[StageMemory]) -> None:
    """Raise EnvironmentFault where stages need more than their device has by more than the
    tolerance.
    """
    missing = [each for each in found if not each.fits()]
    sums: list[str] = []
    settings: dict[str, None] = {}  # each once, in order
    for each in missing:
        device = "its GPU" if each.on_gpu else "this machine"
        workers = f" in each of {each.sharing} workers" if each.sharing > 1 else ""
        room = (each.device_bytes or 0) / GIB
        sums.append(
            f"{each.name} needs about {each.total / GIB:.1f} GiB{workers}, {device} has {room:.1f}"
        )
        settings |= dict.fromkeys(each.saves_memory)
    if missing:
        fix = f"What helps most: {', '.join(settings)}."
        if not missing[0].on_gpu:
            fix += " To plan for GPUs that are elsewhere, give placement.gpu_memory_gb."
        what = (
            f"This does not fit into memory, by an estimate that is ±{TOLERANCE:.0%}:"
            f" {'; '.join(sums)}."
        )
        raise EnvironmentFault(what, "placement", fix)
