"""The cards of what is published: heads, a tuned backbone, the conversations that the target wrote.

Rendered from the run's report and its resolved configuration at any time; missing figures are left out or shown as
unknown. They never contain a local path. `card_facts.py` has their tables, `card_metadata.py` what the Hub reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.export import card_facts, card_metadata
from pipeline.export.card_facts import public
from pipeline.export.card_metadata import Licence
from pipeline.export.card_recipe import commands, recipe_yaml
from pipeline.export.card_text import number, rendered
from pipeline.heads.kind import Heads
from pipeline.report.facts import disturbed


def model_card(
    report: Mapping[str, Any],
    *,
    kind: type[Heads],
    base_model: str | None,
    repo_id: str | None,
    recipe: Mapping[str, Any],
    tuned: bool = False,
    licence: Licence | None = None,
    data_set: str | None = None,
) -> str:
    """The card of heads as Markdown with the Hub's YAML front matter.

    Args:
        report: The content of `report.json`, possibly partial.
        base_model: Hub id of the heads' target or tuned backbone; for None or a local path the card
            says "a local model".
        kind: What the heads are.
        repo_id: The heads' repository; None where it is not known.
        recipe: The run's resolved configuration as plain data.
        tuned: Whether the heads belong to a backbone that was trained with them.
        licence: What is declared for them; None declares nothing.
        data_set: Hub id of the conversations that they were trained on, where those are published.
    """
    base, shared = public(base_model), _shared(report, recipe, kind, data_set)
    section = _sections(report, recipe)
    metadata = card_metadata.heads_metadata(
        kind, base=base, data_sets=shared["data_sets"], served=shared["served"], licence=licence
    )
    return rendered(
        "card_heads.md",
        kind,
        shared
        | _drafting(report, kind, section["train"], repo_id or "PATH_TO_THIS_DIRECTORY")
        | {
            "base": base,
            "tuned": tuned,
            "front_matter": metadata,
            "licence": licence,
            "train": section["train"],
            "generate": section["generate"],
            "shared": (section["export"].get("formats") or [None])[0] == "shared",  # of the export's root
            "settings": card_facts.settings(report, section, tuned),
        },
    )


def backbone_card(
    report: Mapping[str, Any],
    *,
    base_model: str | None,
    repo_id: str,
    heads_repo_id: str,
    kind: type[Heads],
    recipe: Mapping[str, Any],
    licence: Licence | None = None,
    data_set: str | None = None,
) -> str:
    """The card of a tuned backbone: its original, its drift, and its heads.

    Args:
        base_model: Hub id of the model that it was tuned from; for None or a local path "a local model".
        repo_id, heads_repo_id, kind: Where it is, and where its heads are, and what they are.

    The others are those of `model_card`.
    """
    shared, original = _shared(report, recipe, kind, data_set), public(base_model)
    metadata = card_metadata.backbone_metadata(base=original, data_sets=shared["data_sets"], licence=licence)
    own = {"original": original, "here": repo_id, "heads": heads_repo_id, "front_matter": metadata, "licence": licence}
    return rendered("card_backbone.md", kind, shared | own)


def data_set_card(
    report: Mapping[str, Any],
    *,
    repo_id: str,
    base_model: str | None,
    recipe: Mapping[str, Any],
    kind: type[Heads],
    rows: Mapping[str, int],
    splits: Mapping[str, str],
) -> str:
    """The card of the conversations that the target wrote: where prompts and answers are from, terms, columns.

    Args:
        base_model: Hub id of the model that wrote the answers; for None or a local path "a local model".
        kind: The heads that were trained on them.
        rows: How many there are of each split.
        splits: The pattern of each split's files.

    The others are those of `model_card`.
    """
    sources = (recipe.get("seeds") or {}).get("sources") or ()
    seeds, name = card_facts.data_sets(sources), repo_id.rpartition("/")[2]
    own = {
        "here": repo_id,
        "title": name,
        "original": public(base_model),
        "generate": recipe.get("generate") or {},
        "rows": rows,
        "front_matter": card_metadata.data_set_metadata(name, rows=sum(rows.values()), seeds=seeds, splits=splits),
    }
    return rendered("card_data_set.md", kind, _shared(report, recipe, kind, None) | own)


def _sections(report: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections that a card tells of, with what was chosen in the place of `auto`."""
    section = {name: recipe.get(name) or {} for name in ("target", "generate", "train", "export")}
    train = card_facts.chosen(section["train"], (report.get("train") or {}).get("hyperparameters") or {})
    return section | {"train": train}


def _shared(
    report: Mapping[str, Any], recipe: Mapping[str, Any], kind: type[Heads], data_set: str | None
) -> dict[str, Any]:
    """What every card may tell."""
    sources = (recipe.get("seeds") or {}).get("sources") or ()
    original = public((recipe.get("target") or {}).get("model"))
    served = (report.get("export") or {}).get("vllm", kind.vllm_method is not None)
    return {
        "report": report,
        "original": original,
        "drift": card_facts.drift(report),
        "served": served,
        "data_set": data_set,
        "data_sets": [*([data_set] if data_set else []), *card_facts.data_sets(sources)],
        "sources": card_facts.sources_told(sources),
        "recipe_yaml": recipe_yaml(recipe, report.get("target_revision")),
        "commands": commands(recipe, served=served),
        "results": card_facts.results(report),
        "disturbed": any(map(disturbed, (report.get("check") or {}).values())),
        "categories": card_facts.by_category(report, sources),
        "exact_match": card_facts.matching_references(report),
        "draft_lengths": card_facts.by_draft_length(report),
        "tops": card_facts.tops(report),
        "fingerprints": card_facts.fingerprints(report),
    }


def _drafting(report: Mapping[str, Any], kind: type[Heads], train: Mapping[str, Any], here: str) -> dict[str, Any]:
    """How these heads draft, and how an engine is told."""
    tree, num_heads = report.get("tree") or {}, report.get("num_heads") or train.get("num_heads")
    num_tokens = tree.get("num_speculative_tokens") or num_heads
    served = (report.get("export") or {}).get("vllm", kind.vllm_method is not None)
    return {
        "here": here,
        "num_heads": num_heads,
        "num_tokens": num_tokens,
        "own_text": tree.get("text") == "calibrate.data",
        "max_tokens": len(tree.get("chain") or ()) or num_heads,
        "tokens_by_depth": [number(share, ".2f") for share in tree.get("tokens_by_depth") or ()],
        "speculative_config": served and json.dumps(kind.speculative_config(here, num_tokens or "K")),
    }
