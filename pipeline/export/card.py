"""The cards of heads, of a tuned backbone, and of the conversations that the target wrote.

The templates `card_*.md` are rendered with the facts of `card_facts.py`; a value that is missing at
any depth renders as nothing. Above the text stands YAML that the Hub reads. Whether its identifiers
exist the Hub decides when a card is pushed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData, ModelCardData
from jinja2 import ChainableUndefined, ChoiceLoader, DictLoader, Environment, FileSystemLoader

from pipeline.export.card_facts import Published, expected, facts, measured, number
from pipeline.formatting import escaped, pairs
from pipeline.heads.kind import Heads

SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}


def model_card(published: Published) -> str:
    """The card of heads: an adapter of their base model, with the tags that their engines' users
    search for.
    """
    kind, known = published.kind, facts(published)
    tags = [kind.vllm_method or kind.Shape.kind, "speculative-decoding", "self-distillation"]
    library = "medusa-distill"
    if known["served"]:
        tags += ["vllm", "speculators"]
        library = "vllm"
    if kind.Shape.kind not in tags:
        tags.append(kind.Shape.kind)
    return _rendered(
        "card_heads.md", kind, known, _metadata(published, known, "adapter", library, tags)
    )


def backbone_card(published: Published) -> str:
    """The card of a tuned backbone: an ordinary model, fine-tuned from its original."""
    known = facts(published)
    metadata = _metadata(published, known, "finetune", "transformers", ["self-distillation"])
    return _rendered("card_backbone.md", published.kind, known, metadata)


def data_set_card(published: Published, rows: Mapping[str, int]) -> str:
    """The card of the conversations that the target wrote: where prompts and answers are from,
    terms, columns.

    Args:
        rows: The number of rows of each split that has any.
    """
    known = facts(published)
    name, num_rows = known["here"].rpartition("/")[2], sum(rows.values())
    size = "n>1M"
    for most, name_of_size in SIZES.items():
        if num_rows < most:
            size = name_of_size
            break
    files = [{"split": split, "path": f"data/{split}-*"} for split in rows]
    metadata = DatasetCardData(
        license="other",
        license_name="terms-of-prompts-and-model",
        pretty_name=name,
        size_categories=[size],
        source_datasets=known["data_sets"] or ["original"],
        task_categories=["text-generation"],
        tags=["self-distillation", "synthetic", "speculative-decoding"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    known.update(title=name, rows=rows)
    return _rendered("card_data_set.md", published.kind, known, metadata)


def _metadata(
    published: Published, known: Mapping[str, Any], relation: str, library: str, tags: list[str]
) -> ModelCardData:
    data = ModelCardData(
        base_model=known["base"],
        datasets=known["data_sets"] or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=tags,
    )
    if licence := published.licence:
        data.license = licence.id
        data.license_name = licence.name
        data.license_link = licence.link
    if known["base"]:
        data["base_model_relation"] = relation
    return data


def _rendered(
    template: str,
    kind: type[Heads],
    known: Mapping[str, Any],
    metadata: ModelCardData | DatasetCardData,
) -> str:
    text = (
        _environment(kind)
        .get_template(template)
        .render(known, kind=kind, front_matter=metadata.to_yaml())
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


@functools.cache
def _environment(kind: type[Heads]) -> Environment:
    """The templates, among them what the kind says about its heads and their engines."""
    of_kind = {"about": kind.card_about, "engines": kind.card_engines}
    environment = Environment(
        loader=ChoiceLoader([DictLoader(of_kind), FileSystemLoader(Path(__file__).parent)]),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters.update(
        number=number, measured=measured, expected=expected, escaped=escaped, words=_words
    )
    return environment


def _words(value: Any) -> str:
    """A setting as the text of a table's cell."""
    return " ".join(pairs(value).replace("|", "\\|").split())
