"""What the settings ask of the tree and of the chain that vLLM drafts, as far as the kind of heads
can propose it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from pipeline.artifacts.tree_file import read_paths
from pipeline.config import Config
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import CHILDREN, TreePath, check_choices, stock_tree
from pipeline.errors import ConfigError, DataError
from pipeline.export.layout import MAX_NUM_HEADS
from pipeline.heads.kinds import head_kind, max_depth

MEASURED_SIZES = (
    1,
    3,
    7,
    15,
    31,
    63,
    127,
    255,
)  # with the root powers of two, which matrix products are fastest at


def check_tree(config: Config) -> None:
    """Raise ConfigError where more is asked of the heads than they can propose, or the tree cannot
    be read.
    """
    settings, most = config.calibrate, max_depth(config.train)
    if (settings.depth or 1) > most:
        raise ConfigError(
            f"{config.train.num_heads} {config.train.heads} heads propose at most {most} tokens"
            f" ahead, and a tree of depth {settings.depth} is asked for.",
            "calibrate.depth",
            "Lower it or raise train.num_heads.",
        )
    dynamic_tree(config)
    longest, wanted = most_draft_tokens(config), settings.draft_tokens
    if wanted != "auto" and wanted > longest:
        fix = f"Lower it to at most {longest}, or raise train.num_heads."
        raise ConfigError(
            f"These heads cannot draft {wanted} tokens.", "calibrate.draft_tokens", fix
        )
    if settings.choices:
        read_choices(config)


def read_choices(config: Config) -> tuple[TreePath, ...]:
    """The tree of `calibrate.choices`, given directly, by name or as a file, validated for these
    heads.

    A named tree that is deeper than they can propose is cut.

    Raises:
        ConfigError: It cannot be read, or is not a tree.
    """
    given = config.calibrate.choices
    assert given is not None, "a tree is to be searched"
    if isinstance(given, str):
        choices = stock_tree(max_depth(config.train), given)
    elif isinstance(given, Path):
        try:
            choices = read_paths(given)
        except DataError as error:
            near = difflib.get_close_matches(given.name, CHILDREN, n=1)
            fix = f"Did you mean the tree {near[0]}?" if near else error.fix
            raise ConfigError(error.what, f"calibrate.choices = {given}", fix) from None
    else:
        choices = given
    return check_choices(choices, max_depth(config.train), config.calibrate.top)


def dynamic_tree(config: Config) -> DynamicTree | None:
    """How the dynamic tree of these settings grows, to a single node where the number is to be
    found; None of a static one.

    Raises ConfigError where more nodes are asked for than are proposed.
    """
    settings = config.calibrate
    if settings.tree != "dynamic":
        return None
    smallest = DynamicTree(1, settings.depth or config.train.num_heads, settings.top)
    if settings.nodes == "auto":
        return smallest
    if settings.nodes > (most := smallest.num_proposed):
        raise ConfigError(
            f"A dynamic tree of {settings.nodes} nodes is asked for, and of {settings.top} guesses"
            f" per node up to a depth of {smallest.max_depth} only {most} are proposed.",
            "calibrate.nodes",
            f"Lower it to at most {most}, or raise calibrate.top or calibrate.depth.",
        )
    return smallest.resized(settings.nodes)


def most_draft_tokens(config: Config) -> int:
    """How many tokens the heads can draft in a row, and an engine can be told to."""
    return min(max_depth(config.train), MAX_NUM_HEADS)


def times_trees(config: Config) -> bool:
    """Whether the number of nodes is to be found by timing native decoding."""
    return config.calibrate.nodes == "auto" and not config.calibrate.choices


def times_chain(config: Config) -> bool:
    """Whether the chain's number of draft tokens is to be found by timing native decoding."""
    is_served = head_kind(config.train.heads).vllm_method is not None
    return times_trees(config) and config.calibrate.draft_tokens == "auto" and is_served
