"""generate: the target writes the conversations that its heads will learn from (self-distillation, paper 2.3.2).

Promises: every seed becomes a row or is quarantined; answers are the very token ids that were sampled; a
conversation's next turn is submitted the moment its last one ended, so no turn waits for a slower neighbour. A row's
samples depend on the run's seed and the row's id alone, not on its shard, its batch or the number of workers (exactly
on a CPU in fp32; on a GPU with `generate.batch_invariant`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import Refusal, Refused
from pipeline.conversations.dialogue import Dialogue, DialogueSettings, GeneratedRow, Sampling, require_both_sides
from pipeline.conversations.template import ChatTemplate
from pipeline.execution.context import Context
from pipeline.execution.sharded import run_sharded
from pipeline.storage.rows import conversation_of, message_dicts
from pipeline.storage.schemas import GENERATED
from pipeline.storage.shards import Receipt, read_rows
from pipeline.storage.stage_directory import ShardTask, StageDirectory, shard_writer
from pipeline.targets.engines import make_generation_engine
from pipeline.targets.protocol import GenerationEngine
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_tokenizer

NAME = "generate"
VERSION = 1
UPSTREAM = ("seeds",)


def identity(context: Context) -> dict[str, Any]:
    """Every setting shapes the text, and so do the target and the run's seed."""
    settings = context.config.generate.model_dump(mode="json")
    return {"settings": settings, "seed": context.config.run.seed, "target": context.target_identity}


def run(context: Context, stage: StageDirectory) -> dict[str, Any]:
    """Generate every pending shard."""
    placement = context.placement(NAME)
    settings = context.config.generate
    template = ChatTemplate(load_tokenizer(context.target), context.target.chat_template)
    require_both_sides(template, settings.mode)  # told here, before a worker starts
