"""Benchmark of native batch decoding on a GPU: overhead of a step, by batch size and tree size.

As in gpu_decoding.py, heads and target are random, so hardly a guess is accepted, and trained heads
have the same overhead. A larger batch leaves less of the GPU idle, so only smaller trees pay off.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.claims import Claim, Result, in_turns, ratio
from benchmarks.deadline import Deadline
from benchmarks.gpu_decoding import NUM_HEADS, likely_tree
from benchmarks.gpu_size import Size
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from pipeline.targets.loading import lm_head_weight


def measure_batches(model: PreTrainedModel, size: Size, ends: Deadline) -> Result:
    """Measure the overhead of each tree by batch size: decode plainly and with the tree, in turns.

    Heads are tied, since tied heads need no lm_heads of their own in memory.
    """
    claims: list[Claim] = []
    missing: list[str] = []
    text = model.config.get_text_config()
    shape = MedusaShape(text.hidden_size, text.vocab_size, NUM_HEADS, lm_head="tied")
    lm_head_VD = lm_head_weight(model)
    heads = MedusaHeads.initial(shape, TargetWeights(lambda: lm_head_VD, lambda: lm_head_VD))
    generator = torch.Generator().manual_seed(0)
    for num_texts in size.batches:
        prompts = torch.randint(
            2, text.vocab_size, (num_texts, size.prompt_tokens), generator=generator
        ).tolist()
        for num_nodes in size.batch_nodes:
            what = f"overhead, {num_texts} texts at once, {num_nodes} nodes, tied heads"
            if ends():
                missing.append(what)
                continue
            decoders = {
                "plain": plain_decoder(model, eos_token_ids=()),
                "Medusa": Decoder(model, heads, likely_tree(num_nodes), eos_token_ids=()),
            }
            sides = {
                name: _step(decoder, prompts, size.new_tokens) for name, decoder in decoders.items()
            }
            seconds = in_turns(
                sides, size.rounds, ends=ends
            )  # the warm-up captures each width that texts grow to
            told = {f"{name}, ms per step": 1e3 * median(found) for name, found in seconds.items()}
            claims.append(ratio(what, seconds["Medusa"], seconds["plain"], told))
    return Result(
        claims, {"prompt_tokens": size.prompt_tokens, "new_tokens": size.new_tokens}, missing
    )


def _step(decoder: Decoder, prompts: list[list[int]], new_tokens: int) -> Callable[[], float]:
    """Return a function that decodes all prompts as one batch and returns the seconds per step."""

    def seconds() -> float:
        decoded = decoder.generate_batch(prompts, new_tokens)
        longest = max(decoded, key=lambda one: one.num_steps)
        return longest.seconds / longest.num_steps

    return seconds
