"""Facts that cards state about a run, from its report and its configuration.

Every part of the report is optional. Local paths and file names are private and never stated: a
local model has no name, a local source of seeds is a number. Values that only need a format get it
in the templates.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.config import Config, SeedSource
from pipeline.conversations.sources import name_sources
from pipeline.export.licence import Licence
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind
from pipeline.report.facts import STAGES, disturbed, has_seen_answers, on_new_answers

RECIPE_SECTIONS = {
    "target",
    "seeds",
    "generate",
    "features",
    "train",
    "calibrate",
    "export",
    "check",
}
CACHES = (
    "features",
    "tuned-features",
)  # stages that may be deleted to make room: no figure of a card is theirs
ENGINES = {"native": "native, tree", "vllm": "vLLM, top-1 chain"}
MEASURES = (
    ("overhead (time of a step over a plain one)", "overhead", ".2f"),
    ("speedup", "speedup", ".2f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("tokens/s without heads", "baseline_tokens_per_second", ",.0f"),
)


@dataclass(frozen=True)
class Published:
    """A run as its cards describe it.

    Attributes:
        report: The content of `report.json`, possibly partial.
        config: The configuration that the heads were made by.
        repo_id: The repository of what the card describes; None where it is not known.
        base_model: The heads' target or tuned backbone, or the model that a backbone was tuned from
            or that wrote the answers. For None or a local path the card says "a local model".
        tuned: Whether the heads belong to a backbone that was trained with them.
        licence: What the card declares; None declares nothing.
        data_set: Hub id of the conversations, where they are published.
        heads_repo_id: The heads' repository, for a backbone's card.
    """

    report: Mapping[str, Any]
    config: Config
    repo_id: str | None = None
    base_model: str | None = None
    tuned: bool = False
    licence: Licence | None = None
    data_set: str | None = None
    heads_repo_id: str | None = None

    @property
    def kind(self) -> type[Heads]:
        return head_kind(self.config.train.heads)


def facts(published: Published) -> dict[str, Any]:
    """Collect everything that the templates read."""
    report, config, kind = published.report, published.config, published.kind
    check, tree = report.get("check") or {}, report.get("tree") or {}
    served = (report.get("export") or {}).get("vllm", kind.vllm_method is not None)
    here = published.repo_id or "PATH_TO_THIS_DIRECTORY"
    num_heads = report.get("num_heads") or config.train.num_heads
    num_tokens = tree.get("num_speculative_tokens") or num_heads
    data_sets = [source.hub for source in config.seeds.sources if source.hub]
    if published.data_set:
        data_sets.insert(0, published.data_set)
    return {
        **vars(published),
        "base": public(published.base_model),
        "original": public(config.target.model),
        "here": here,
        "served": served,
        "speculative_config": json.dumps(kind.speculative_config(here, num_tokens)),
        "num_heads": num_heads,
        "shared": config.export.formats[0] == "shared",  # of the export's root
        "train": _trained_with(report, config),
        "generate": config.generate,
        "data_sets": data_sets,
        "source_names": public_names(config.seeds.sources),
        "engines": [title for name, title in ENGINES.items() if check.get(name)],
        "results": results(report),
        "disturbed": any(disturbed(part) for part in check.values()),
        "answer_methods": _answer_methods(check.get("exact_match") or ()),
        "tops": _tops(report.get("heads") or ()),
        "fingerprints": fingerprints(report),
        "recipe_yaml": recipe_yaml(config, report.get("target_revision")),
    }


def public(model: str | None) -> str | None:
    """A Hub id; None for a local path, which is private."""
    if model is None or os.path.isabs(model):
        return None
    return model


def public_names(sources: Sequence[SeedSource]) -> dict[str, str]:
    """The public name of each source, by its name in ids and categories."""
    found = {}
    for number, (name, source) in enumerate(
        zip(name_sources(sources), sources, strict=True), start=1
    ):
        found[name] = source.hub or f"local-{number}"
    return found


def fingerprints(report: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the stages that the figures come from, in their order."""
    found = (report.get("run") or {}).get("fingerprints") or {}
    return {name: found[name] for name in STAGES if name in found and name not in CACHES}


def results(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Rows of the check's table: a label, then a text per engine; rows without any text are left
    out.
    """
    columns = []
    for name in ENGINES:
        part = (report.get("check") or {}).get(name)
        if part:
            predicted = (report.get("tree") or {}) if name == "native" else part
            columns.append(
                _engine_results(part, predicted, with_new=has_seen_answers(dict(report)))
            )
    if not columns:
        return {}
    rows = {label: [column[label] for column in columns] for label in columns[0]}
    return {label: texts for label, texts in rows.items() if any(texts)}


def _engine_results(
    part: Mapping[str, Any], predicted: Mapping[str, Any], *, with_new: bool
) -> dict[str, str]:
    texts = {
        "acceleration rate (tokens per target forward)": measured(part),
        "predicted on held-out text": expected(predicted),
    }
    if with_new:
        texts["answers that are in the training text as well"] = number(
            part.get("seen_share"), ".0%"
        )
        texts["acceleration rate on the other answers"] = on_new_answers(part)
        texts["predicted on other held-out answers"] = expected(predicted.get("new") or {})
    for label, key, spec in MEASURES:
        is_untrue = key in ("overhead", "speedup") and disturbed(
            part
        )  # other load made the plain steps slow
        texts[label] = "" if is_untrue else number(part.get(key), spec)
    texts["greedy sequences identical"] = _matched(part.get("greedy_match") or {})
    return texts


def _matched(match: Mapping[str, Any]) -> str:
    if not match:
        return ""
    text = f"{match.get('identical', '?')} of {match.get('sequences', '?')}"
    if match.get("ties"):
        text += f", {match['ties']} parted at a tie"
    return text


def number(value: Any, spec: str = ",.0f") -> str:
    """A number in a format; empty for an unknown or non-finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return format(value, spec)


def with_error(rate: Any, error: Any) -> str:
    """A rate and its standard error, `2.31 ± 0.05`; empty where the rate is unknown."""
    text, error = number(rate, ".2f"), number(error, ".2f")
    return f"{text} ± {error}" if text and error else text


def measured(part: Any) -> str:
    return with_error(part.get("acceleration_rate"), part.get("standard_error"))


def expected(promise: Any) -> str:
    return with_error(
        promise.get("expected_acceleration_rate"), promise.get("expected_standard_error")
    )


def recipe_yaml(config: Config, revision: str | None = None) -> str:
    """The settings that are no default, as YAML; a local path stands as `PATH_TO_…`.

    Args:
        revision: The commit of a Hub target that was read.
    """
    chosen = config.model_dump(
        mode="json", include=RECIPE_SECTIONS, exclude_defaults=True, exclude_none=True
    )
    if revision:
        chosen["target"]["revision"] = revision
    recipe = {"run": {"name": "reproduction", "seed": config.run.seed}, **_without_paths(chosen)}
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)


def _without_paths(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, key) for item in value]
    if isinstance(value, str) and os.path.isabs(value):
        return f"PATH_TO_{key.upper()}"
    return value


def _trained_with(report: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The settings of `train`, also of the backbone's, with what was chosen in the place of
    `auto`.
    """
    chosen = (report.get("train") or {}).get("hyperparameters") or {}
    train = config.train.model_dump(mode="json")
    for section in (train, train["backbone"]):
        for key, value in section.items():
            if value == "auto":
                section[key] = chosen.get(key, value)
    return train


def _answer_methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns of the table of answers that are their reference, in the order of their first row."""
    methods: dict[str, None] = {}
    for row in rows:
        methods.update(dict.fromkeys(row))
    return [name for name in methods if name not in ("category", "answers")]


def _tops(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    """`top1`, `top5` and what else was measured of any head."""
    keys = {key for head in heads for key in head if key.startswith("top") and key[3:].isdigit()}
    return sorted(keys, key=lambda key: int(key[3:]))
