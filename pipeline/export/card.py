"""Hub cards of heads and of a tuned backbone.

The templates `card_*.md` show the report's own tables. A value that is missing at any depth renders
as nothing. Local paths and file names are private and never stated: a local model is "a local
model", a local seed source is `local-1`. The Hub validates the YAML front matter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HTTPError
from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from pipeline.config import Config, SeedSource
from pipeline.conversations.sources import name_sources
from pipeline.export.layout import CARD_FILE
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind
from pipeline.report.check_tables import categories_table, check_table, served_model_table
from pipeline.report.comparison import NO_RECIPE
from pipeline.report.facts import expected_rate, measured_rate, pairs
from pipeline.report.report import Report
from pipeline.report.speeds import is_disturbed
from pipeline.report.tables import drift_table, heads_table
from pipeline.report.text_table import markdown_table
from pipeline.report.what_to_serve import what_to_serve_table


@dataclass(frozen=True)
class Licence:
    """A licence in a Hub card: the Hub's identifier, and for `other` a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


def licence_of(model: str, revision: str | None, *, online: bool) -> Licence | None:
    """Read the licence in a model's Hub card; None if there is no readable card or licence.

    Args:
        model: A local directory or a Hub id; without `online` only the Hub's cache is read.
    """
    try:
        file = str(Path(model, CARD_FILE))
        if not Path(model).is_dir():
            file = hf_hub_download(model, CARD_FILE, revision=revision, local_files_only=not online)
        data = ModelCard.load(file, ignore_metadata_errors=True).data
    except (HTTPError, OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(data.license, str):
        return None
    link = data.license_link
    if link and "://" not in link:
        link = None  # a relative link is valid only in the model's own repository
    return Licence(data.license, data.license_name, link)


@dataclass(frozen=True)
class Published:
    """The facts about a run that the Hub cards state.

    Attributes:
        report: Possibly partial.
        config: The configuration of the run.
        repo_id: The repository that the card belongs to; None if unknown.
        base_model: The heads' target or tuned backbone, or the model that a backbone was tuned
            from. For None or a local path the card says "a local model".
        tuned: Whether the heads belong to a backbone that was trained with them.
        licence: The declared licence; None declares nothing.
        heads_repo_id: The heads' repository, for a backbone's card.
    """

    report: Report
    config: Config
    repo_id: str | None = None
    base_model: str | None = None
    tuned: bool = False
    licence: Licence | None = None
    heads_repo_id: str | None = None

    @property
    def kind(self) -> type[Heads]:
        """The kind of the heads that the Hub card describes."""
        return head_kind(self.config.train.heads)


Facts = dict[str, Any]  # the variables of a template


def model_card(published: Published) -> str:
    """Render the Hub card of heads, which are an adapter of their base model."""
    kind, facts = published.kind, _card_facts(published)
    tags = {kind.Shape.kind, "speculative-decoding", "self-distillation"}
    if kind.vllm_method:
        tags.add(kind.vllm_method)
    library = "medusa-distill"
    if facts["served"]:
        tags |= {"vllm", "speculators"}
        library = "vllm"
    metadata = _card_metadata(published, facts, "adapter", library, sorted(tags))
    return _render_card("card_heads.md", facts, metadata)


def backbone_card(published: Published) -> str:
    """Render the Hub card of a tuned backbone, which is a fine-tuned model."""
    facts = _card_facts(published)
    metadata = _card_metadata(published, facts, "finetune", "transformers", ["self-distillation"])
    return _render_card("card_backbone.md", facts, metadata)


def _card_metadata(
    published: Published, facts: Facts, relation: str, library: str, tags: list[str]
) -> ModelCardData:
    """Collect a model card's metadata; `relation` says how the model derives from its base."""
    data = ModelCardData(
        base_model=facts["base"],
        datasets=facts["data_sets"] or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=tags,
    )
    if published.licence:
        data.license = published.licence.id
        data.license_name = published.licence.name
        data.license_link = published.licence.link
    if facts["base"]:
        data["base_model_relation"] = relation
    return data


def _render_card(template: str, facts: Facts, metadata: ModelCardData) -> str:
    """Render a Hub card from its template, with the metadata as YAML front matter."""
    kind = facts["kind"]
    text = CARDS.get_template(template).render(
        facts,
        about=CARDS.from_string(kind.card_about),
        engines=CARDS.from_string(kind.card_engines),
        front_matter=metadata.to_yaml(),
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _card_number(value: Any, spec: str = ",.0f") -> str:
    """Format a number for a Hub card; empty if the number is unknown."""
    return format(value, spec) if isinstance(value, int | float) else ""


def _card_words(value: Any) -> str:
    """Format a setting as one table cell of a Hub card."""
    return " ".join(pairs(value).replace("|", "\\|").split())


CARDS = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=ChainableUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
CARDS.filters.update(
    number=_card_number,
    measured=measured_rate,
    expected=expected_rate,
    grid=markdown_table,
    words=_card_words,
)


def _card_facts(published: Published) -> Facts:
    """Collect the variables of the Hub card templates, by name."""
    report, config, kind = published.report, published.config, published.kind
    here = published.repo_id or "PATH_TO_THIS_DIRECTORY"
    num_heads = report.num_heads or config.train.num_heads
    num_tokens = num_heads if not report.tree else report.tree.num_speculative_tokens
    is_served = kind.vllm_method is not None
    if report.export:
        is_served = report.export.vllm
    data_sets = [source.hub for source in config.seeds.sources if source.hub]
    categories = categories_table(report)
    names = public_names(config.seeds.sources)
    categories.columns = [names.get(column, column) for column in categories.columns]
    return {
        **vars(published),
        "kind": kind,
        "base": public_model(published.base_model),
        "original": public_model(config.target.model),
        "here": here,
        "served": is_served,
        "speculative_config": json.dumps(kind.speculative_config(here, num_tokens)),
        "num_heads": num_heads,
        "shared": config.export.formats[0] == "shared",  # the root's format
        "train": _card_train_settings(report, config),
        "data_sets": data_sets,
        "disturbed": report.native is not None and is_disturbed(report.native),
        "tables": {
            "check": check_table(report),
            "categories": categories,
            "serve": what_to_serve_table(report),
            "served_model": served_model_table(report),
            "heads": heads_table(report),
            "drift": drift_table(report),
        },
        "recipe_yaml": recipe_yaml(config, report.target_revision),
    }


def public_model(model: str | None) -> str | None:
    """Return the Hub id of a model for its Hub card; None for a local path, which is private."""
    if model is None or os.path.isabs(model):
        return None
    return model


def public_names(sources: Sequence[SeedSource]) -> dict[str, str]:
    """Map each seed source's name to its public name in Hub cards: its Hub id or `local-N`."""
    found = {}
    names = name_sources(sources)
    for number, (name, source) in enumerate(zip(names, sources, strict=True), start=1):
        found[name] = source.hub or f"local-{number}"
    return found


def recipe_yaml(config: Config, revision: str | None) -> str:
    """Return a run's settings as YAML for a Hub card; local paths become `PATH_TO_…`.

    Default settings and settings that no result depends on are left out. The recipe's run is named
    `reproduction`.

    Args:
        revision: The commit of the Hub target that the run used.
    """
    chosen = config.model_dump(
        mode="json", exclude=NO_RECIPE, exclude_defaults=True, exclude_none=True
    )
    if revision:
        chosen["target"]["revision"] = revision
    recipe = {"run": {"name": "reproduction", "seed": config.run.seed}, **_without_paths(chosen)}
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)


def _without_paths(value: Any, key: str = "") -> Any:
    """Return nested settings for a Hub card, with `PATH_TO_KEY` in place of absolute paths."""
    if isinstance(value, dict):
        return {name: _without_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, key) for item in value]
    if isinstance(value, str) and os.path.isabs(value):
        return f"PATH_TO_{key.upper()}"
    return value


def _card_train_settings(report: Report, config: Config) -> Facts:
    """Return the `train` settings for a Hub card, with `auto` replaced by the chosen values."""
    train = config.train.model_dump(mode="json")
    chosen = {}
    if report.train:
        chosen = report.train.hyperparameters or {}
    for section in (train, train["backbone"]):
        for key, value in section.items():
            if value == "auto":
                section[key] = chosen.get(key, value)
    return train
