"""What each stage's worker takes of its device's memory, and what there is: said by `plan`, and checked before a run.

By arithmetic, from the target's config.json, the settings and the card. Limits: what happens inside vLLM is its own
affair (a share of the card, of which keys and values get what weights and states leave); prompts of the check are taken
to be at most `TYPICAL_TOKENS` long, since only generating tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from pipeline.artifacts.feature_writer import BACKLOG_BYTES
from pipeline.config import Config
from pipeline.config.training import Bits
from pipeline.errors import EnvironmentFault
from pipeline.execution.device_memory import GIB, Device, Memory, gpu_memory, machine_memory, num_gpus
from pipeline.heads.export_format import export_format
from pipeline.heads.shape import head_kind
from pipeline.run.placements import OF_ENGINE
from pipeline.run.served_copy import served_model
from pipeline.run.stage_budget import StageBudget
from pipeline.run.tree_settings import MEASURED_SIZES, times_trees
from pipeline.targets.sizes import TargetSizes, forward_bytes, target_sizes
from pipeline.targets.spec import resolve
from pipeline.targets.transformers_generation import MAX_BATCH_TOKENS
from pipeline.targets.vllm_engine import CPU_KV_CACHE_BYTES
from pipeline.training.memory import FP32, HeadsSizes, StepSizes, held_out_rows
from pipeline.training.methods import method_of

VLLM_SHARE = 0.92  # of a GPU: vLLM's own default of gpu_memory_utilization
VLLM_BATCH_TOKENS = 8192  # of a forward, its own default for most cards
TYPICAL_TOKENS = 4096
SHORT_TOKENS = 512  # of prompts that are no long documents
MANY_POSITIONS = 10**8  # where their number is not known: batches are then the largest that the rule makes


def sizes_of(config: Config) -> TargetSizes | None:
    """The target's sizes, in the dtype that its workers would load; None where its weights alone would tell.

    Raises:
        ConfigError, EnvironmentFault: Its configuration cannot be read.
    """
    return target_sizes(resolve(config.target, on_gpu=_Machine(config).on_gpu("features")))


def budgets(config: Config, sizes: TargetSizes, positions: int | None = None) -> list[StageBudget]:
    """Every stage that memory decides on, in order.

    Args:
        sizes: Of the configured target.
        positions: To train on, where their number is known.
    """
    return list(_Stages(config, _Machine(config), sizes).all(positions))


class _Machine:
    """Where stages run, as far as can be known from here."""

    def __init__(self, config: Config):
        self.placement, self.gpu = config.placement, gpu_memory()
        self.elsewhere = bool(os.environ.get("RAY_ADDRESS"))
        self.visible = 0 if self.elsewhere else num_gpus()
        if config.placement.gpu_memory_gb:
            self.gpu, self.visible = config.placement.gpu_memory_gb * GIB, 0

    def gpus(self, stage: str) -> int:
        """The GPUs of each of a stage's workers."""
        wanted = self.placement.of_stages()[stage].gpus_per_worker
        return int(self.gpu is not None) if wanted is None else wanted

    def on_gpu(self, stage: str) -> bool | None:
        return True if self.gpus(stage) else None if self.elsewhere else False

    def device(self, stage: str) -> Device:
        if self.gpus(stage):
            return Device("its GPU", self.gpu, on_gpu=True)
        return Device("this machine", None if self.elsewhere else machine_memory(), on_gpu=False)

    def workers(self, stage: str) -> int:
        """As many as are asked for; `auto` is as many as this machine's GPUs have room for, and one without."""
        wanted = self.placement.of_stages()[stage].workers
        if wanted != "auto":
            return wanted
        gpus = self.gpus(stage)
        return max(1, self.visible // gpus) if gpus else 1


class _Stages:
    """The budgets of one configuration's stages."""

    def __init__(self, config: Config, machine: _Machine, sizes: TargetSizes):
        self.config, self.machine, self.sizes = config, machine, sizes
        self.context = min(sizes.context, config.target.max_tokens or sizes.context)
        self.kind, self.method = head_kind(config.train.heads), method_of(config.train)
        shape = self.kind.shape_of(config.train, sizes.hidden_size, sizes.vocab_size).drafting(config.train.draft_vocab)
        self.shape, self.heads, self.depth = shape, HeadsSizes.of(self.kind, shape), shape.max_depth

    def all(self, positions: int | None) -> Iterator[StageBudget]:
        config = self.config
        if config.generate.mode != "passthrough":
            yield self.generate()
        if "features" not in self.method.skipped(config.train) or self.method.tunes_backbone:
            yield self.features()
        yield from self.train(positions or MANY_POSITIONS)
        if not config.calibrate.data:
            yield self.calibrate()
        if times_trees(config):
            yield self.timing()
        if "native" in config.check.engines:
            yield self.check("check", self.sizes, config.target.quantization)
            if copy := self._copy_sizes("native"):
                yield self.check("served copy", copy)
        if "vllm" in config.check.engines:
            yield self.in_vllm("vLLM check", self.sizes)
            if copy := self._copy_sizes("vllm"):
                yield self.in_vllm("vLLM copy", copy)

    def generate(self) -> StageBudget:
        settings = self.config.generate
        if settings.engine == "vllm":
            return self._generating("generate", settings.engine_args)
        tokens = int(settings.engine_args.get("max_batch_tokens", MAX_BATCH_TOKENS))
        one = min(self.context, TYPICAL_TOKENS)
        return self._budget("generate", *(self._decoding("generate", each) for each in (max(tokens, one), one)))

    def features(self) -> StageBudget:
        settings, one = self.config.features, min(self.context, TYPICAL_TOKENS)
        if settings.engine == "vllm":
            return replace(self._generating("features", settings.engine_args), on_host=BACKLOG_BYTES)
        weights = self._weights("features")
        batches = (max(settings.tokens_per_batch, one), one)
        found = (Memory(weights, activations=forward_bytes(self.sizes, each)) for each in batches)
        return replace(self._budget("features", *found), on_host=BACKLOG_BYTES)

    def train(self, positions: int) -> Iterator[StageBudget]:
        train, workers = self.config.train, self.machine.workers("train")
        device = self.machine.device("train")
        for name, learner in self.method.phases(train):
            recipe = learner.expected_recipe(train, positions, self.sizes.hidden_size, self.kind.lr_scale)
            step = StepSizes(
                train, self.heads, self.sizes, recipe, workers, device.on_gpu, self.config.target.quantization
            )
            whole = learner.memory(step)
            memory = whole
            on_host = FP32 * self.heads.weights if device.on_gpu else 0  # they start there, whole
            found = StageBudget(name or "train", memory, memory, device, 1 if device.on_gpu else workers, whole)
            yield replace(found, on_host=on_host)

    def calibrate(self) -> StageBudget:
        """The heads in fp32, and one held-out conversation at a time."""
        memory = held_out_rows(self.heads, self.depth, min(self.context, TYPICAL_TOKENS))
        return StageBudget("calibrate", memory, memory, self.machine.device("train"), 1)

    def timing(self) -> StageBudget:
        """The target and its heads, and a cache for plain decoding and for every tree that is timed."""
        sizes, bits, caches = self.sizes, self.config.target.quantization, 1 + len(MEASURED_SIZES)
        longest, short = min(self.context, TYPICAL_TOKENS), min(self.context, SHORT_TOKENS)
        found, least = (self._natively("timing", sizes, bits, tokens, caches) for tokens in (longest, short))
        return replace(found, least=least.memory, otherwise="fits if held-out prompts are short")

    def check(self, stage: str, sizes: TargetSizes, quantization: Bits | None = None) -> StageBudget:
        """The target, or the copy that will be served, and its heads, a cache for each side, one prompt at a time."""
        tokens = min(self.context, TYPICAL_TOKENS) + self.config.check.max_new_tokens
        return self._natively(stage, sizes, quantization, tokens, 2)

    def in_vllm(self, stage: str, sizes: TargetSizes) -> StageBudget:
        """The target, or its copy, with the heads as the export has them; plain vLLM comes before it and takes less.

        Of heads, too, vLLM splits what has a row for each token over the GPUs, and nothing else.
        """
        section, config = OF_ENGINE["vllm"], self.config
        gpus, longest = max(1, self.machine.gpus(section)), min(self.context, TYPICAL_TOKENS)
        stored = self.kind.shapes(self.shape, export_format(config.export.formats[0])).values()
        by_token = sum(prod(each) for each in stored if each[0] == self.shape.target_vocab_size)
        numbers = sum(map(prod, stored)) - by_token * (1 - 1 / gpus)
        weights = sizes.weight_bytes() / gpus
        return self._served(
            stage,
            section,
            sizes,
            Memory(weights, heads=numbers * sizes.itemsize),
            {},
            longest + config.check.max_new_tokens,
        )

    def _natively(
        self, stage: str, sizes: TargetSizes, quantization: Bits | None, tokens: int, caches: int
    ) -> StageBudget:
        section = OF_ENGINE["native"]
        gpus = max(1, self.machine.gpus(section))
        memory = Memory(
            weights=sizes.weight_bytes(quantization) / gpus,
            heads=self.heads.weights * sizes.itemsize,
            activations=forward_bytes(sizes, tokens),
            cache=caches * tokens * sizes.cached_bytes / gpus,
        )
        return StageBudget(stage, memory, memory, self.machine.device(section), 1)

    def _copy_sizes(self, engine: str) -> TargetSizes | None:
        """Those of `check.served_model`; None without one, and where it cannot be looked at now."""
        on_gpu = self.machine.on_gpu(OF_ENGINE[engine])
        try:
            copy = served_model(self.config, resolve(self.config.target, on_gpu=on_gpu), on_gpu=on_gpu)
        except EnvironmentFault:  # the Hub cannot be reached: said elsewhere
            return None
        return target_sizes(copy) if copy else None

    def _decoding(self, stage: str, tokens: int) -> Memory:
        cache = tokens * self.sizes.cached_bytes / max(1, self.machine.gpus(stage))
        activations = forward_bytes(self.sizes, min(tokens, TYPICAL_TOKENS))
        return Memory(self._weights(stage), activations=activations, cache=cache)

    def _generating(self, stage: str, engine_args: dict[str, Any]) -> StageBudget:
        longest = int(engine_args.get("max_model_len") or self.context)
        return self._served(stage, stage, self.sizes, Memory(self._weights(stage)), engine_args, longest)

    def _served(
        self,
        stage: str,
        section: str,
        sizes: TargetSizes,
        loaded: Memory,
        engine_args: dict[str, Any],
        longest: int,
    ) -> StageBudget:
        """vLLM: of its share of the card, keys and values get what is left, and need at least one conversation."""
        device, gpus = self.machine.device(section), max(1, self.machine.gpus(section))
        tokens = int(engine_args.get("max_num_batched_tokens") or VLLM_BATCH_TOKENS)
        activations = forward_bytes(sizes, min(tokens, self.context)) / gpus
        least = loaded.plus(activations=activations, cache=sizes.conversation_bytes(longest, tokens) / gpus)
        if not device.on_gpu:
            least = replace(least, cache=max(CPU_KV_CACHE_BYTES, 2 * longest * sizes.cached_bytes))
            workers = self.machine.workers(section) if stage == section else 1
            return StageBudget(stage, least, least, device, workers)
        device = replace(device, share=float(engine_args.get("gpu_memory_utilization", VLLM_SHARE)))
        left = 0.0 if device.room is None else device.room - least.total
        return StageBudget(stage, least.plus(cache=max(0.0, left)), least, device, on_device=1)

    def _weights(self, stage: str) -> float:
        return self.sizes.weight_bytes(self.config.target.quantization) / max(1, self.machine.gpus(stage))

    def _budget(self, stage: str, memory: Memory, least: Memory) -> StageBudget:
        device = self.machine.device(stage)
        return StageBudget(stage, memory, least, device, 1 if device.on_gpu else self.machine.workers(stage))
