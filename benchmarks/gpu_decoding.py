"""Benchmark of native decoding on a GPU: overhead of a step with a tree, by tree size.

Heads and target are random, so hardly a guess is accepted and the acceleration rate is meaningless.
A step's cost does not depend on the number of accepted tokens, so trained heads have the same
overhead. The overhead has an aim at 64 nodes: five untied heads with a vocabulary of 32,000 add a
tenth to the bytes that a step reads, tied heads read the lm_head once more.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result
from benchmarks.deadline import Deadline
from benchmarks.gpu_size import Size
from pipeline.artifacts.json_form import to_json
from pipeline.decoding.decoder import Decoded, Decoder, plain_decoder
from pipeline.decoding.tree import TreePath
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import ACCELERATED, PLAIN, Pace, check_speed
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from pipeline.targets.loading import lm_head_weight

NUM_HEADS = 5
# Typical accuracies of head k's i-th guess, only to shape the trees.
ACCURACY_KR = [[0.6 * 0.8**k / (i + 1) ** 1.5 for i in range(10)] for k in range(NUM_HEADS)]
AIM_NODES, AIMS = 64, {"untied": 1.15, "tied": 1.06}


def likely_tree(num_nodes: int) -> tuple[TreePath, ...]:
    """Return the tree of the `num_nodes` paths with the largest products of accuracies."""
    chosen: list[TreePath] = []
    frontier: list[tuple[float, TreePath]] = [(-1.0, ())]
    while len(chosen) <= num_nodes:
        negative, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < NUM_HEADS:
            for rank, accuracy in enumerate(ACCURACY_KR[len(path)]):
                heapq.heappush(frontier, (negative * accuracy, (*path, rank)))
    return tuple(chosen[1:])  # without the root


def measure_decoding(model: PreTrainedModel, size: Size, ends: Deadline) -> Result:
    """Measure the overhead of each tree: decode the prompts plainly and with each tree, in turns.

    Trees that cannot be warmed up in half of the time are not measured.
    """
    if ends():
        return Result([], {}, ["decoding: the overhead of every tree"])
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        2, text.vocab_size, (size.num_prompts, size.prompt_tokens), generator=generator
    ).tolist()
    reset_peak_memory(size.device)
    trees = {num_nodes: likely_tree(num_nodes) for num_nodes in size.tree_nodes}
    decoders: dict[tuple[str, int], Decoder] = {("", 0): plain_decoder(model, eos_token_ids=())}
    lm_head_VD = lm_head_weight(model)
    for kind in AIMS:
        shape = MedusaShape(text.hidden_size, text.vocab_size, NUM_HEADS, lm_head=kind)
        heads = MedusaHeads.initial(shape, TargetWeights(lambda: lm_head_VD, lambda: lm_head_VD))
        decoders |= {
            (kind, n): Decoder(model, heads, tree, eos_token_ids=()) for n, tree in trees.items()
        }
    ready, late = _warmed_up(decoders, prompts[0], size.new_tokens, ends.halfway())
    decoded: dict[tuple[str, int], list[Decoded]] = {key: [] for key in ready}
    for number, prompt in enumerate(prompts):
        if number and ends():
            break
        for key, decoder in ready.items():
            decoded[key].append(decoder.generate(prompt, size.new_tokens))
    memory, plain = peak_memory_gb(size.device), decoded.pop(("", 0))
    claims: list[Claim] = []
    facts: dict[str, Any] = {}
    for (kind, num_nodes), with_tree in decoded.items():
        asked = [Prompt(str(number), prompts[number]) for number in range(len(plain))]
        passes = [{PLAIN: plain, ACCELERATED: with_tree}]
        figures = check_speed(asked, passes)
        identical = sum(
            one.token_ids == other.token_ids for one, other in zip(plain, with_tree, strict=True)
        )
        what = f"{num_nodes} nodes, {kind} heads"
        facts[what] = to_json(figures) | {"identical_sequences": identical}
        tree_pace, plain_pace = Pace.of(passes, ACCELERATED), Pace.of(passes, PLAIN)
        speedup = tree_pace.tokens_per_second / plain_pace.tokens_per_second
        overhead = tree_pace.acceleration_rate / speedup
        sides = {
            "Medusa, tokens/s": tree_pace.tokens_per_second,
            "plain, tokens/s": plain_pace.tokens_per_second,
            "peak GPU memory, GB": memory,
        }
        aim = AIMS[kind] if num_nodes == AIM_NODES else None
        claims.append(Claim(f"overhead, {what}", overhead, aim=aim, at_most=True, sides=sides))
    missing = [f"overhead, {num_nodes} nodes, {kind} heads" for kind, num_nodes in late]
    facts |= {
        "prompts": len(plain),
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
    }
    return Result(claims, facts, missing)


def _warmed_up(
    decoders: dict[tuple[str, int], Decoder], prompt: list[int], new_tokens: int, ends: Deadline
) -> tuple[dict[tuple[str, int], Decoder], list[tuple[str, int]]]:
    """Warm up decoders until the deadline, at least the plain decoder and one with a tree.

    Returns the warm decoders, and the keys of the remaining decoders.
    """
    ready: dict[tuple[str, int], Decoder] = {}
    for key, decoder in decoders.items():
        if len(ready) > 1 and ends():
            break
        # At full length: each new width is captured as the text grows.
        decoder.generate(prompt, new_tokens)
        ready[key] = decoder
    return ready, [key for key in decoders if key not in ready]
