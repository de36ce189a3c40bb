"""Benchmark of a decoding step's overhead with a tree on a CPU, by tree size and batch size.

Measured: seconds per step of `Decoder` with trees of 1 to 256 nodes over seconds per step of
`plain_decoder`, the same loop without a tree. Both run in turns, on the number of threads at which
plain decoding is fastest. Batches: the same for a tree of 8 nodes and several texts at once. Heads
are untrained and untied (the more expensive kind): a step's cost does not depend on the number of
accepted tokens. The gpu benchmark has the curve for a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import PreTrainedModel

from benchmarks import targets
from benchmarks.claims import Claim, Result, in_turns, ratio
from benchmarks.gpu_decoding import ACCURACY_KR, NUM_HEADS
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import greedy_tree
from pipeline.evaluation.overhead import fastest_threads
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from pipeline.targets.loading import lm_head_weight, load_causal_lm

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES, NODES_IN_BATCHES = (1, 2, 4, 8, 16), 8
PROMPT_TOKENS, NUM_STEPS, ROUNDS = 64, 12, 7


def measure(*, tiny: bool = False) -> Result:
    """Measure the overheads with a random backbone of 50M parameters and the demo's target."""
    claims: list[Claim] = []
    threads: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        large = targets.random_target(
            directory / "large", targets.TINY if tiny else targets.BACKBONE
        )
        cases = {
            "a random backbone of 50M parameters": large,
            "the demo's target": targets.demo_target(directory),
        }
        for what, target in cases.items():
            model = load_causal_lm(target, "cpu", 1)
            prompt = torch.randint(
                2, 200, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)
            ).tolist()
            with (
                fastest_threads(plain_decoder(model, eos_token_ids=()), prompt) as chosen,
                torch.inference_mode(),
            ):
                threads[what] = chosen
                claims += overheads(model, what, prompt, tiny=tiny)
    facts = {
        "threads": threads,
        "prompt_tokens": PROMPT_TOKENS,
        "steps": NUM_STEPS,
        "num_heads": NUM_HEADS,
    }
    return Result(claims, facts)


def overheads(
    model: PreTrainedModel, what: str, prompt: Sequence[int], *, tiny: bool
) -> list[Claim]:
    """Measure a step's overhead; return one claim per tree size and one per batch size."""
    config = MedusaShape(model.config.hidden_size, model.config.vocab_size, NUM_HEADS)
    lm_head_VD = lm_head_weight(model)
    heads = MedusaHeads.initial(
        config, TargetWeights(lambda: lm_head_VD, lambda: lm_head_VD)
    ).eval()
    plain = plain_decoder(model, eos_token_ids=())
    trees = {
        size: Decoder(model, heads, greedy_tree(ACCURACY_KR, size), eos_token_ids=())
        for size in SIZES
    }
    rounds = 1 if tiny else ROUNDS
    by_size = in_turns(
        {n: lambda d=d: seconds_per_step(d, [prompt]) for n, d in {0: plain, **trees}.items()},
        rounds,
    )
    claims = [claim(f"{size} nodes, {what}", by_size[size], by_size[0]) for size in SIZES]
    for batch in BATCHES[: 2 if tiny else None]:
        sides = {
            name: lambda d=decoder, b=batch: seconds_per_step(d, [prompt] * b)
            for name, decoder in (("plain", plain), ("tree", trees[NODES_IN_BATCHES]))
        }
        taken = in_turns(sides, rounds)
        claims.append(
            claim(f"{NODES_IN_BATCHES} nodes, {batch} texts, {what}", taken["tree"], taken["plain"])
        )
    return claims


def claim(what: str, with_tree: Sequence[float], plain: Sequence[float]) -> Claim:
    sides = {"with the tree, ms": 1e3 * median(with_tree), "plain, ms": 1e3 * median(plain)}
    return ratio(f"overhead, {what}", with_tree, plain, sides)


def seconds_per_step(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> float:
    """Return a decoder's seconds per step of a batch, after the prefills."""
    steps = decoder.stream_batch(prompts, (NUM_STEPS + 1) * (decoder.tree.max_depth + 1))
    for _ in prompts:
        next(steps)
    started = perf_counter()
    for _ in range(NUM_STEPS):
        next(steps)
    return (perf_counter() - started) / NUM_STEPS
