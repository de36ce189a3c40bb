"""Decoding methods in vLLM that the heads are compared with: drafts that cost no training.

    ngram        the tokens that followed the last tokens of the context, where these occurred
                 before (prompt lookup)
    draft-model  a smaller model with the same vocabulary (`check.assistant_model`)
    heads with N drafts  the heads with another number of draft tokens (`check.draft_tokens`)

Every method writes the target's greedy text. A method that fails is left out with its reason.
"""

from __future__ import annotations

from pipeline.artifacts.check_result import HEADS
from pipeline.config import CheckConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.prompts import CheckRequest
from pipeline.export.layout import Content, read_layout

DRAFTED = 4  # tokens per step of a method without heads
LONGEST_NGRAM = 3


def heads_config(request: CheckRequest) -> Content:
    """Return vLLM's speculative configuration of the checked heads."""
    if request.speculative_config is not None:
        return dict(request.speculative_config)
    return read_layout(request.export).speculative_config(request.export)


def compared_configs(request: CheckRequest) -> dict[str, Content]:
    """Return vLLM's speculative configuration of each method to compare with, by its name."""
    settings = request.settings
    own = heads_config(request)
    found = {}
    for number in settings.draft_tokens:
        if number != own["num_speculative_tokens"]:
            found[f"{HEADS} with {number} drafts"] = {**own, "num_speculative_tokens": number}
    for name in settings.engine_baselines:
        if name == "ngram":
            config: Content = {
                "method": "ngram",
                "num_speculative_tokens": DRAFTED,
                "prompt_lookup_max": LONGEST_NGRAM,
                "prompt_lookup_min": 1,
            }
        else:
            assert request.assistant is not None, "CheckConfig asks for both"
            config = {
                "method": "draft_model",
                "model": request.assistant.model,
                "num_speculative_tokens": DRAFTED,
            }
        found[name] = config
    return found


def longest_draft(settings: CheckConfig) -> int:
    """Return how many tokens the compared methods draft in a step at most."""
    return max([*settings.draft_tokens, DRAFTED])


def require_methods(settings: CheckConfig, max_draft_tokens: int) -> None:
    """Check that vLLM can draft by the methods that the check compares with.

    Raises:
        ConfigError: The heads propose fewer tokens than `check.draft_tokens` asks for.
    """
    if "vllm" not in settings.engines:
        return
    longest = max(settings.draft_tokens, default=0)
    if longest > max_draft_tokens:
        raise ConfigError(
            f"These heads propose {max_draft_tokens} tokens in a row, and {longest} are asked for.",
            "check.draft_tokens",
            "Lower it or raise train.num_heads.",
        )
