"""Estimate the time of each stage by arithmetic, before it runs.

A stage's seconds are its operations and bytes over the rates that its device reaches, plus fixed
seconds for starting workers and engines and for each step. The estimate is meant to be right within
a factor of two. It leaves out downloads, reading weights from disk, studies, and writing shards,
which overlaps the computation.

    operations = 2 per token and parameter of the layers (forward)
               + 6 per trained and 4 per frozen parameter, position and head (training)
    bytes      = weights, keys and values in each decoding step
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.evaluation.gpu_figures import GpuFigures, gpu_figures
from pipeline.evaluation.overhead import NUM_PROMPTS, NUM_STEPS
from pipeline.evaluation.served_figures import NUM_IN_TURN
from pipeline.execution.machine import copy_rate, product_rate
from pipeline.run.estimate import (
    PROMPT_SHARE,
    RunSize,
    count_trained,
    heads_to_count,
    planned_gpu_memory,
)
from pipeline.run.resolved import ENGINE_SECTIONS, ResolvedRun
from pipeline.targets.sizes import TargetSizes
from pipeline.targets.spec import cached_numbers
from pipeline.training.recipe import Recipe
from pipeline.training.task import Learner

# Shares of rates that stages reach. On an H100 (benchmarks/results/gpu.json) the features stage
# reached 0.55 and training 0.53 of large products' 741 TFLOP/s, which are 0.75 of the data sheet's,
# and a plain step read 14.5 GB in 8.9 ms, 0.49 of the data sheet's bandwidth.
OF_PRODUCTS = 0.54  # measured ones
OF_PEAK = 0.40
OF_PEAK_BANDWIDTH = 0.49

REQUESTS = 256  # that vLLM answers at once
ENGINE_MEMORY = 0.92  # of a GPU's memory, which vLLM takes
TIMED_SIZES = 16  # trees and chains that calibrate times

# Seconds on two cores, by the recorded demo (docs/images/demo.txt) and vLLM beside it. The features
# stage took 5.6 s for 0.9 s of work, training 22 for 7.8 and generate 18 for 4.3. A decoding step
# took 1.2 ms natively and 3.7 ms in vLLM. A GPU's steps have no seconds of their own: the share of
# the bandwidth was measured with them.
WORKER = 4.7  # starts, imports torch and transformers, and loads the target
TRAINER = 14.0  # Ray Train starts, evaluates and writes
ENGINE = 14.0  # vLLM starts
CPU_STEP = 2e-3  # of decoding, natively or in vLLM


@dataclass(frozen=True)
class Rates:
    """The rates that stages reach on one device, per second."""

    operations: float
    num_bytes: float
    memory: float | None = None  # bytes of a GPU; None on a CPU

    @classmethod
    def of_cpu(cls) -> Rates:
        """Return the rates that this machine's CPU reaches, measured in half a second."""
        return cls(OF_PRODUCTS * product_rate(), copy_rate())

    @classmethod
    def of_gpu(cls, gpu: GpuFigures, memory: float) -> Rates:
        """Return the rates that a GPU reaches, by its peak figures and its memory in bytes."""
        operations = OF_PEAK * gpu.tflops * 1e12
        return cls(operations, OF_PEAK_BANDWIDTH * gpu.bandwidth_gbs * 1e9, memory)

    def times(self, devices: int) -> Rates:
        """Return the rates of several such GPUs together."""
        memory = devices * (self.memory or 0)
        return Rates(devices * self.operations, devices * self.num_bytes, memory)


@dataclass(frozen=True)
class Hours:
    """Estimates of the time of each stage of a run, in seconds, by arithmetic.

    Attributes:
        size: The run's size; its number of tokens is known.
        rates: The rates of each section of `placement`, of all its workers together.
    """

    run: ResolvedRun
    size: RunSize
    target: TargetSizes
    rates: Mapping[str, Rates]

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage that takes more than an instant, by its name."""
        method, holdout = self.run.method, self.run.config.seeds.holdout
        found = {"generate": self.generating()}
        if "features" not in method.skipped_stages(self.run.config.train):
            found["features"] = self.caching()
        if self.run.shape.row_layers:
            found["row-features"] = self.caching()
        found["train"] = self.training()
        if method.tunes_backbone:
            found["tuned-features"] = self.caching(holdout)
        found["calibrate"] = self.calibrating()
        found["check"] = self.checking()
        return found

    @property
    def written(self) -> int:
        """The number of tokens that the target writes."""
        return self.size.tokens or 0

    def generating(self) -> float:
        """Return the seconds of generate: starts, decoding steps, and the forward of prompts.

        As many requests are answered at once as memory holds, at most `REQUESTS`. On average half
        of a text is cached. In passthrough mode nothing is decoded.
        """
        if self.run.config.generate.mode == "passthrough":
            return 0.0
        rates = self.rates["generate"]
        num_texts = max(1, self.size.conversations or 1) * self.size.samples
        per_text = self.written / num_texts
        cached = cached_numbers(self.run.target_config) * self.target.itemsize
        text_bytes = max(1.0, cached * per_text * (1 + PROMPT_SHARE))
        weights = self.target.weight_bytes()
        requests = min(REQUESTS, num_texts)
        if rates.memory is not None:
            held = (ENGINE_MEMORY * rates.memory - weights) // text_bytes
            requests = max(1, min(requests, int(held)))
        step = max(
            (weights + requests * text_bytes / 2) / rates.num_bytes,
            2 * self.target.parameters * requests / rates.operations,
        )
        if rates.memory is None:
            step += CPU_STEP
        prompts = 2 * self.target.linear * PROMPT_SHARE * self.written / rates.operations
        return ENGINE + self.written / requests * step + prompts

    def caching(self, share: float = 1.0) -> float:
        """Return the seconds of features: a pass of the layers over a share of all tokens."""
        rates = self.rates["features"]
        tokens = share * self.written * (1 + PROMPT_SHARE)
        return WORKER + 2 * self.target.linear * tokens / rates.operations

    def training(self) -> float:
        """Return the seconds of all training phases."""
        seconds = 0.0
        phases = self.run.method.phases(self.run.config.train)
        for recipe, (_, learner) in zip(self.size.recipes, phases, strict=False):
            seconds += TRAINER + self._steps(recipe, learner)
        return seconds

    def _steps(self, recipe: Recipe, learner: type[Learner]) -> float:
        """Return the seconds of the optimizer steps of a training phase."""
        train = self.run.config.train
        positions = recipe.epochs * self.size.positions
        operations = positions * self.head_operations()
        if learner.tunes_backbone:
            tokens = positions * (1 + PROMPT_SHARE)
            passes = 3 + train.backbone.gradient_checkpointing  # forward, backward, the original
            operations += 2 * passes * self.target.linear * tokens
            operations += 6 * self.run.shape.vocab_size * self.run.shape.hidden_size * positions
        return operations / self.rates["train"].operations

    def head_operations(self) -> float:
        """Return the operations of training per position: each product forward and twice backward.

        A frozen lm_head has no gradient: one product less. Soft labels need the target's logits.
        """
        train = self.run.config.train
        one_head = heads_to_count(self.run, 1)
        lm_head = one_head.lm_head.numel()
        operations = 6 * count_trained(one_head)
        if not one_head.lm_head.requires_grad:
            operations += 4 * lm_head
        operations *= train.num_heads
        if train.soft_labels:
            operations += 2 * lm_head
        return operations

    def calibrating(self) -> float:
        """Return the seconds of calibrate: a worker's start, and timed trees."""
        if not self.run.times_trees:
            return WORKER
        steps = TIMED_SIZES * NUM_PROMPTS * NUM_STEPS
        return 2 * WORKER + steps * 2 * self.plain_step("features")

    def plain_step(self, section: str) -> float:
        """Return the seconds in which the target decodes one token of one text."""
        rates = self.rates[section]
        seconds = self.target.weight_bytes() / rates.num_bytes
        return seconds + CPU_STEP if rates.memory is None else seconds

    def checking(self) -> float:
        """Return the seconds of the check, if every step keeps one token.

        Natively the prompts are decoded one by one. A pass in vLLM decodes all of them at once, and
        then up to `NUM_IN_TURN` one by one. vLLM starts once per method, and once more for plain
        decoding.
        """
        check, seconds = self.run.config.check, 0.0
        prompts = check.prompts if isinstance(check.prompts, int) else 80
        for engine in check.engines:
            section = ENGINE_SECTIONS[engine]
            step = self.plain_step(section)
            if engine == "native":
                methods = 2 + len(check.baselines)
                answers = methods * (check.repeats + 1) * prompts  # with a warm-up
                seconds += WORKER
            else:
                methods = 3 + len(check.engine_baselines) + len(check.draft_tokens)
                passes = (methods - 1) * check.repeats + 1  # plain decoding once more
                answers = passes * (1 + NUM_IN_TURN)
                seconds += methods * ENGINE
            seconds += answers * check.max_new_tokens * step
        return seconds


def rates_of_sections(run: ResolvedRun, target: TargetSizes) -> dict[str, Rates] | None:
    """Return the rates of the workers of each section of `placement`, all together.

    A GPU's rates follow from its peak figures. A CPU's rates are measured, and its workers share
    them. The result is None if the peak figures are unknown, or if the CPU is elsewhere.
    """
    found = {}
    for section in run.config.placement.of_stages():
        num_gpus = run.gpus_of(section)
        rates = _rates_of_device(run, target, on_gpu=num_gpus > 0)
        if rates is None:
            return None
        if num_gpus:
            rates = rates.times(run.workers_of(section) * num_gpus)
        found[section] = rates
    return found


def _rates_of_device(run: ResolvedRun, target: TargetSizes, *, on_gpu: bool) -> Rates | None:
    """Return the rates of one GPU, or of this machine's CPU; None if they are not known."""
    if not on_gpu:
        return None if os.environ.get("RAY_ADDRESS") else Rates.of_cpu()
    is_here = run.config.placement.gpu_memory_gb is None and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if is_here else None
    gpu = gpu_figures(run.config.placement, name, target)
    memory = planned_gpu_memory(run)
    if gpu is None or memory is None:
        return None
    return Rates.of_gpu(gpu, memory)
