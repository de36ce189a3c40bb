"""The size of a run: from its finished stages, or else from the seeds and the configuration's limits."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.mixing import mixed
from pipeline.conversations.readers import source_readers
from pipeline.errors import EnvironmentFault
from pipeline.heads.shape import head_kind
from pipeline.storage.done import Summary
from pipeline.targets.spec import context_length, model_config, resolve
from pipeline.training.methods import method_of
from pipeline.training.recipe import Recipe

ASSUMED_HIDDEN_SIZE = 4096  # a 7B model's, while the target cannot be looked up


@dataclass(frozen=True)
class RunSize:
    """Upper bounds: every answer as long as it may be, until generate has run and the true counts are known."""

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


def estimate(config: Config, seeds: Summary | None, generated: Summary | None) -> RunSize:
    """Tokens to write and to cache, and the bytes of each.

    Args:
        seeds, generated: The summaries of these stages, where they are done.
    """
    import torch  # --help does not wait for it

    from pipeline.artifacts.feature_rows import state_bytes

    longest = config.generate.rounds * config.generate.max_new_tokens
    gpus, assumed = config.placement.features.gpus_per_worker, ""
    if gpus is None and config.placement.gpu_memory_gb:
        gpus = 1
    try:
        spec = resolve(config.target, on_gpu=None if gpus is None else gpus > 0)
        hidden_size, dtype = model_config(spec).get_text_config().hidden_size, getattr(torch, spec.dtype)
        longest = min(longest, context_length(spec))
    except EnvironmentFault as error:
        hidden_size, dtype = ASSUMED_HIDDEN_SIZE, torch.bfloat16
        assumed = f"{error.what} So states of {hidden_size:,} numbers in 16 bits are assumed, as 7B models have them."
    rows = int(seeds["rows"]) if seeds else _count(config)
    bound = None if rows is None else rows * longest
    tokens = int(generated.get("tokens", 0)) if generated else bound
    skipped = "features" in method_of(config.train).skipped(config.train)
    stored = 0 if skipped else state_bytes(hidden_size, dtype, config.features.precision)
    share = seeds["train_rows"] / seeds["rows"] if seeds and seeds["rows"] else 1 - config.seeds.holdout
    positions = round((tokens or 0) * share)
    recipes = _recipes(config, positions, hidden_size)
    return RunSize(rows, tokens, stored, bool(generated), assumed, positions or None, recipes)


def _recipes(config: Config, positions: int, hidden_size: int) -> tuple[Recipe, ...]:
    """How so many positions would be learned, phase by phase; nothing of none."""
    phases = method_of(config.train).phases(config.train) if positions else []
    sizes = (positions, hidden_size, head_kind(config.train.heads).lr_scale)
    return tuple(learner.expected_recipe(config.train, *sizes) for _, learner in phases)


def _count(config: Config) -> int | None:
    """The conversations in local files, and those that limits allow of the Hub's."""
    readers = source_readers(config.seeds)
    limits = [reader.source.limit for reader in readers if reader.source.hub]
    if None in limits:
        return None
    local = [reader for reader in readers if reader.source.path]
    return sum(filter(None, limits)) + sum(isinstance(row, Conversation) for row in mixed(local))
