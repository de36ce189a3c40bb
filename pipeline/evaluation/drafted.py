"""The baseline `retrieval`, which drafts without heads in native decoding.

It decodes greedily with the decoder that verifies the heads' trees. Its trees have at most as many
nodes as the heads' tree.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pipeline.artifacts.seen_answers import TrainingText
from pipeline.config import BaselineName, CheckConfig
from pipeline.decoding.acceptance import greedy_acceptance
from pipeline.decoding.drafting import DraftDecoder
from pipeline.decoding.retrieval import Datastore, Retrieval
from pipeline.errors import ConfigError
from pipeline.evaluation.speed import Decode, decode_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RETRIEVAL: BaselineName = "retrieval"


def require_training_text(settings: CheckConfig, trained: TrainingText | None) -> None:
    """Raise ConfigError if the baseline `retrieval` has no training text to read."""
    if trained is None and RETRIEVAL in settings.baselines:
        raise ConfigError(
            "The baseline retrieval reads a run's training text, and these heads are checked"
            " without a run.",
            "check.baselines",
            "Use generate, prompt-lookup or assistant, or check the heads in a run.",
        )


def retrieval_baseline(
    trained: TrainingText,
    model: PreTrainedModel,
    num_nodes: int,
    *,
    num_tokens: int,
    eos_token_ids: Collection[int],
    max_length: int,
) -> Decode:
    """Return the decoding method `retrieval`, built from a run's training text.

    Args:
        num_nodes: The maximum number of nodes of a candidate tree.
        num_tokens: The maximum number of new tokens.
        eos_token_ids: The tokens that end a sequence.
        max_length: Limit of prompt and new tokens together.

    Raises:
        DamagedShard, DataError, EnvironmentFault: The training text cannot be read.
    """
    drafter = Retrieval(Datastore(trained.texts()), num_nodes)
    decoder = DraftDecoder(model, drafter, eos_token_ids=eos_token_ids, max_length=max_length)
    return decode_by(decoder, greedy_acceptance, num_tokens)
