"""What the Hub reads of a card: the YAML at its top, with licence, library, relation to the base model, and tags.

Limit: nothing here asks the Hub whether an identifier exists; it answers when a card is pushed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    DatasetCardData,
    ModelCard,
    ModelCardData,
    constants,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from yaml import YAMLError

from pipeline.heads.kind import Heads

HUB = "https://huggingface.co"
SPECULATORS = "speculators"  # the format of config.json that names its target
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


@dataclass(frozen=True)
class Licence:
    """A licence as a card states it: the Hub's identifier, and for `other` a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


def licence_of(model: str, revision: str | None, *, online: bool) -> Licence | None:
    """The licence that a model's own card states, None where there is none or the card cannot be read.

    Args:
        model: A local directory or a Hub id; with `online: False` only what the Hub's cache holds is read.
    """
    try:
        local = Path(model).is_dir()
        file = str(Path(model, "README.md")) if local else _fetched(model, revision, online)
        data = ModelCard.load(file, ignore_metadata_errors=True).data
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError, ValueError, YAMLError):
        return None
    if not isinstance(data.license, str):
        return None
    name, link = (value if isinstance(value, str) else None for value in (data.license_name, data.license_link))
    if link and "://" not in link:  # a file beside the card
        link = None if local else posixpath.join(f"{HUB}/{model}/blob/{revision or 'main'}", link)
    return Licence(data.license, name, link)


def _fetched(model: str, revision: str | None, online: bool) -> str:
    if online:
        return hf_hub_download(model, "README.md", revision=revision)
    cached = try_to_load_from_cache(model, "README.md", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    if not isinstance(cached, str):
        raise FileNotFoundError(f"{model} has no card in the cache")
    return cached


def heads_metadata(
    kind: type[Heads], *, base: str | None, data_sets: Sequence[str], served: bool, licence: Licence | None
) -> str:
    """The metadata of heads: an adapter of their base model, in the tags that their engines' users search for."""
    engines = ["vllm", SPECULATORS] if served else []
    tags = [kind.vllm_method or kind.Shape.kind, "speculative-decoding", *engines, "self-distillation"]
    library = "vllm" if served else "medusa-distill"
    return _model_metadata(base, "adapter", [*dict.fromkeys([*tags, kind.Shape.kind])], data_sets, library, licence)


def backbone_metadata(*, base: str | None, data_sets: Sequence[str], licence: Licence | None) -> str:
    """The metadata of a tuned backbone: an ordinary model, fine-tuned from its original."""
    return _model_metadata(base, "finetune", ["self-distillation"], data_sets, "transformers", licence)


def _model_metadata(
    base: str | None,
    relation: str,
    tags: list[str],
    data_sets: Sequence[str],
    library: str,
    licence: Licence | None,
) -> str:
    data = ModelCardData(
        base_model=base,
        datasets=list(data_sets) or None,
        library_name=library,
        license=licence.id if licence else None,
        license_name=licence.name if licence else None,
        license_link=licence.link if licence else None,
        pipeline_tag="text-generation",
        tags=tags,
    )
    if base:
        data["base_model_relation"] = relation
    return data.to_yaml()


def data_set_metadata(name: str, *, rows: int, seeds: Sequence[str], splits: Mapping[str, str]) -> str:
    """The metadata of published conversations.

    Args:
        seeds: Hub ids of the data sets that the prompts are from.
        splits: The pattern of each split's files.
    """
    files: list[dict[str, Any]] = [{"split": split, "path": path} for split, path in splits.items()]
    return DatasetCardData(
        license="other",
        license_name="terms-of-prompts-and-model",
        pretty_name=name,
        size_categories=[next((size for most, size in SIZES if rows < most), "n>1M")],
        source_datasets=list(seeds) or ["original"],
        task_categories=["text-generation"],
        tags=["self-distillation", "synthetic", "speculative-decoding"],
        configs=[{"config_name": "default", "data_files": files}],
    ).to_yaml()
