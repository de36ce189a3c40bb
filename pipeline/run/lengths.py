"""Numbers of tokens that leave no room for one another: refused before the stage that pays for
them.
"""

from __future__ import annotations

from collections.abc import Collection

from pipeline.config import Config
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.evaluation.prompts import with_room
from pipeline.targets.spec import context_length, resolve


def require_labels(config: Config, stages: Collection[str] | None) -> None:
    """Raise ConfigError where no answer that the target may write has a label for the last head.

    Head k reads the state before an answer's token and guesses the (k+1)-th after that token, so
    that an answer of n tokens has labels for n - 1 heads. Passed-through answers are as long as the
    seeds have them.
    """
    num_heads, longest = config.train.num_heads, config.generate.max_new_tokens
    if config.generate.mode == "passthrough" or num_heads < longest or not _wanted("train", stages):
        return
    what = (
        f"Answers of at most {longest} tokens have nothing that head {num_heads - 1} could learn to"
        " guess."
    )
    fewer = f"Train at most {longest - 1} heads, or raise" if longest > 1 else "Raise"
    raise ConfigError(what, "train.num_heads", f"{fewer} generate.max_new_tokens.")


def require_room(config: Config, stages: Collection[str] | None) -> None:
    """Raise ConfigError for a target that no stage can use, or whose context what the check decodes
    would fill.

    A target that cannot be reached now is asked again when the run needs it.
    """
    try:
        target = resolve(config.target)
        if not _wanted("check", stages):
            return
        context = context_length(with_room(target, config.check))
    except EnvironmentFault:
        return
    if config.check.max_new_tokens >= context:
        what = (
            f"{config.check.max_new_tokens} tokens after a prompt do not fit in the target's"
            f" context of {context}."
        )
        raise ConfigError(
            what, "check.max_new_tokens", f"Lower it: a prompt needs some of the {context}, too."
        )


def _wanted(stage: str, stages: Collection[str] | None) -> bool:
    return stages is None or stage in stages
