"""The model card: what the heads are, how they were trained, their figures, and how to serve them.

Rendered from the run's report and its resolved configuration at any time; missing figures are left out or shown as
unknown. It never contains a local path.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import ChainableUndefined, ChoiceLoader, DictLoader, Environment, FileSystemLoader

from pipeline.heads.kind import Heads

MEASURES = (
    ("acceleration rate (tokens per target forward)", "acceleration_rate", ".2f"),
    ("overhead (time of a step over a plain one)", "overhead", ".2f"),
    ("speedup", "speedup", ".2f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("tokens/s without heads", "baseline_tokens_per_second", ",.0f"),
)
TRAIN_SETTINGS = (
    "heads", "method", "num_heads", "draft_vocab", "decay", "roles", "lr", "epochs", "batch_tokens", "warmup_steps",
    "optimizer", "weight_decay", "max_grad_norm", "precision",
)  # fmt: skip
BACKBONE_SETTINGS = (
    "recipe", "loss", "schedule", "lambda_0", "lr", "lora_rank", "lora_alpha", "lora_dropout", "sequence_length",
    "batch_sequences", "quantization",
)  # fmt: skip


def model_card(
    report: Mapping[str, Any],
    *,
    kind: type[Heads],
    base_model: str | None,
    repo_id: str | None,
    recipe: Mapping[str, Any],
    tuned: bool = False,
) -> str:
    """The card as Markdown with the Hub's YAML front matter.

    Args:
        report: The content of `report.json`, possibly partial.
        base_model: Hub id of the heads' target or tuned backbone; for None or a local path the card
            says "a local model".
        kind: What the heads are.
        repo_id: The heads' repository; None where it is not known.
        recipe: The run's resolved configuration as plain data.
        tuned: Whether the heads belong to a backbone that was trained with them.
    """
    base = _public(base_model)
    section = {name: recipe.get(name) or {} for name in ("target", "seeds", "generate", "train", "export")}
    section["train"] = _chosen(section["train"], (report.get("train") or {}).get("hyperparameters") or {})
    num_heads = report.get("num_heads") or section["train"].get("num_heads")
    tree = report.get("tree") or {}
    num_tokens = tree.get("num_speculative_tokens") or num_heads
    here = repo_id or "PATH_TO_THIS_DIRECTORY"
    sources = section["seeds"].get("sources") or ()
    facts = {
        "report": report,
        "base": base,
        "tuned": tuned,
        "original": _public(section["target"].get("model")),
        "drift": _drift(report),
        "here": here,
        "num_heads": num_heads,
        "num_tokens": num_tokens,
        "own_text": tree.get("text") == "calibrate.data",
        "max_tokens": len(tree.get("chain") or ()) or num_heads,
        "tokens_by_depth": [_number(share, ".2f") for share in tree.get("tokens_by_depth") or ()],
        "chain": next((row for row in tree.get("chain") or () if row.get("draft_tokens") == num_tokens), None),
        "train": section["train"],
        "generate": section["generate"],
        "shared": "shared" in (section["export"].get("formats") or ()),
        "kind": kind,
        "front_matter": _front_matter(kind, base, _data_sets(sources)),
        "speculative_config": _served(report, kind) and json.dumps(kind.speculative_config(here, num_tokens or "K")),
        "engines": _engines(report),
        "measures": MEASURES,
        "tops": _tops(report),
        "sources": _sources(sources),
        "settings": _settings(report, section, tuned),
    }
    return _rendered("card_heads.md", facts)


def backbone_card(
    report: Mapping[str, Any],
    *,
    base_model: str | None,
    repo_id: str,
    heads_repo_id: str,
    kind: type[Heads],
    recipe: Mapping[str, Any],
) -> str:
    """The card of a tuned backbone: its original, its drift, and its heads.

    Args:
        base_model: Hub id of the model that it was tuned from; for None or a local path "a local model".
        repo_id, heads_repo_id, kind: Where it is, and where its heads are, and what they are.

    The others are those of `model_card`.
    """
    original = _public(base_model)
    sources = (recipe.get("seeds") or {}).get("sources") or ()
    facts = {
        "original": original,
        "here": repo_id,
        "heads": heads_repo_id,
        "drift": _drift(report),
        "kind": kind,
        "served": _served(report, kind),
        "front_matter": _front_matter(kind, original, _data_sets(sources), "finetune"),
    }
    return _rendered("card_backbone.md", facts)


def _served(report: Mapping[str, Any], kind: type[Heads]) -> bool:
    """Whether vLLM serves these heads with their target."""
    return (report.get("export") or {}).get("vllm", kind.vllm_method is not None)


def _chosen(train: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `train`, also of the backbone's, with what was chosen in the place of `auto`."""

    def of(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: hyperparameters.get(key, value) if value == "auto" else value for key, value in settings.items()}

    return of({key: of(value) if isinstance(value, Mapping) else value for key, value in train.items()})


def _public(model: str | None) -> str | None:
    """A Hub id; None for a local path, which is private."""
    return None if model is None or os.path.isabs(model) else model


def _drift(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The drift of a tuned backbone on held-out text, as rows of a table."""
    drift = (report.get("train") or {}).get("drift") or {}
    perplexity = drift.get("perplexity") or {}
    before, after = (_number(perplexity.get(side), ".3f") for side in ("original", "tuned"))
    rows = (
        ("KL(original ‖ tuned), nats per token", _number(drift.get("kl"), ".4f")),
        ("perplexity of the original's own text", before and after and f"{before} → {after}"),
        ("change of that perplexity", _number(drift.get("perplexity_change"), "+.2%")),
        ("same greedy token", _number(drift.get("greedy_agreement"), ".2%")),
        ("tokens looked at", _number(drift.get("positions"))),
    )
    return [(label, value) for label, value in rows if value]


def _rendered(name: str, facts: Mapping[str, Any]) -> str:
    text = _environment(facts["kind"]).get_template(name).render(facts)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _front_matter(kind: type[Heads], base: str | None, data_sets: list[str], relation: str = "adapter") -> str:
    data = ModelCardData(
        base_model=base,
        datasets=data_sets or None,
        pipeline_tag="text-generation",
        tags=[kind.Shape.kind, "speculative-decoding", "self-distillation"],
    )
    if base:
        data["base_model_relation"] = relation
    return data.to_yaml()


def _engines(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    check = report.get("check") or {}
    names = {"native": "native, tree", "vllm": "vLLM, top-1 chain"}
    return [(name, check[key]) for key, name in names.items() if check.get(key)]


def _tops(report: Mapping[str, Any]) -> list[str]:
    keys = {key for head in report.get("heads") or () for key in head if key.startswith("top") and key[3:].isdigit()}
    return sorted(keys, key=lambda top: int(top[3:]))


def _data_sets(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    return [source["hub"] for source in sources if source.get("hub")]


def _sources(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hub data sets by name; local files only by number, since their names are private."""
    named = [f"[{name}](https://huggingface.co/datasets/{name})" for name in _data_sets(sources)]
    num_local = len(sources) - len(named)
    return named + ([f"{num_local} local source(s)"] if num_local else [])


def _settings(
    report: Mapping[str, Any], section: Mapping[str, Mapping[str, Any]], tuned: bool
) -> list[tuple[str, Any]]:
    train = report.get("train") or {}
    chosen = section["train"]
    of_kind, of_backbone = chosen.get(chosen.get("heads") or "") or {}, (chosen.get("backbone") or {}) if tuned else {}
    settings = [
        *((name, chosen.get(name)) for name in TRAIN_SETTINGS),
        *of_kind.items(),
        *((f"backbone.{name}", of_backbone.get(name)) for name in BACKBONE_SETTINGS),
        ("target's dtype", section["target"].get("dtype")),
        ("target's quantization", section["target"].get("quantization")),
        ("positions trained on", _number(train.get("tokens"))),
        ("final loss", _number(train.get("final_loss"), ".3f")),
        ("hardware", report.get("hardware")),
        ("versions", report.get("versions")),
    ]
    return [(name, value) for name, value in settings if value not in (None, "")]


def _environment(kind: type[Heads]) -> Environment:
    """A Jinja environment for Markdown; missing values at any depth render as nothing."""
    of_kind = {"about": kind.card_about, "engines": kind.card_engines}
    environment = Environment(
        loader=ChoiceLoader([DictLoader(of_kind), FileSystemLoader(Path(__file__).parent)]),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= {"number": _number, "matched": _matched, "words": _words, "expected": _expected}
    return environment


def _number(value: Any, spec: str = ",.0f") -> str:
    """A number in a format; empty for an unknown or non-finite one."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, spec) if known else ""


def _expected(promise: Any) -> str:
    """An expected acceleration rate and its standard error; empty where it is unknown."""
    rate, error = (_number(promise.get(f"expected_{name}"), ".2f") for name in ("acceleration_rate", "standard_error"))
    return f"{rate} ± {error}" if rate and error else rate


def _matched(match: Any) -> str:
    if not match:
        return "-"
    parted = f", {match['ties']} parted at a tie" if match.get("ties") else ""
    return f"{match.get('identical', '?')} of {match.get('sequences', '?')}{parted}"


def _words(value: Any) -> str:
    """A setting as the text of a table's cell."""
    if isinstance(value, Mapping):
        value = [f"{key} {item}" for key, item in value.items() if item is not None]
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(text.replace("|", "\\|").split())
