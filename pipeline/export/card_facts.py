"""What cards tell of a run: its report and its resolved configuration as rows of tables.

Local paths and file names are private and never shown: a local source of seeds is a number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import SeedSource
from pipeline.conversations.readers import name_sources
from pipeline.export.card_metadata import HUB
from pipeline.export.card_text import expected, number, with_error
from pipeline.report.facts import STAGES, disturbed, has_seen_answers, on_new_answers
from pipeline.report.formatting import escaped

MEASURES = (
    ("overhead (time of a step over a plain one)", "overhead", ".2f"),
    ("speedup", "speedup", ".2f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("tokens/s without heads", "baseline_tokens_per_second", ",.0f"),
)
ENGINES = {"native": "native, tree", "vllm": "vLLM, top-1 chain"}
TRAIN_SETTINGS = (
    "heads", "method", "num_heads", "draft_vocab", "decay", "roles", "lr", "epochs", "batch_tokens", "warmup_steps",
    "optimizer", "weight_decay", "max_grad_norm", "precision",
)  # fmt: skip
CACHES = ("features", "tuned-features")  # stages that may be deleted to make room: no figure of a card is theirs
BACKBONE_SETTINGS = (
    "recipe", "loss", "schedule", "lambda_0", "lr", "lora_rank", "lora_alpha", "lora_dropout", "sequence_length",
    "batch_sequences", "quantization",
)  # fmt: skip


def fingerprints(report: Mapping[str, Any]) -> dict[str, str]:
    """Those of the stages that the figures come from."""
    found = (report.get("run") or {}).get("fingerprints") or {}
    return {name: found[name] for name in STAGES if name in found and name not in CACHES}


def public(model: str | None) -> str | None:
    """A Hub id; None for a local path, which is private."""
    return None if model is None or os.path.isabs(model) else model


def chosen(train: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `train`, also of the backbone's, with what was chosen in the place of `auto`."""

    def of(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: hyperparameters.get(key, value) if value == "auto" else value for key, value in settings.items()}

    return of({key: of(value) if isinstance(value, Mapping) else value for key, value in train.items()})


def drift(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The drift of a tuned backbone on held-out text."""
    found = (report.get("train") or {}).get("drift") or {}
    perplexity = found.get("perplexity") or {}
    before, after = (number(perplexity.get(side), ".3f") for side in ("original", "tuned"))
    rows = (
        ("KL(original ‖ tuned), nats per token", number(found.get("kl"), ".4f")),
        ("perplexity of the original's own text", before and after and f"{before} → {after}"),
        ("change of that perplexity", number(found.get("perplexity_change"), "+.2%")),
        ("same greedy token", number(found.get("greedy_agreement"), ".2%")),
        ("tokens looked at", number(found.get("positions"))),
    )
    return [(label, value) for label, value in rows if value]


def results(report: Mapping[str, Any]) -> list[list[str]]:
    """The check as a table: its engines, then measured and predicted rates with errors, times, identical texts."""
    check = report.get("check") or {}
    untrue = {"overhead": None, "speedup": None}  # where other load made the plain steps slow
    found = {name: check[name] for name in ENGINES if check.get(name)}
    engines = {name: {**part, **untrue} if disturbed(part) else part for name, part in found.items()}
    if not engines:
        return []
    promises = [(report.get("tree") or {}) if name == "native" else part for name, part in engines.items()]
    parts = list(engines.values())
    rows = [
        ["acceleration rate (tokens per target forward)", *(measured(part) for part in parts)],
        ["predicted on held-out text", *map(expected, promises)],
    ]
    if has_seen_answers(dict(report)):
        rows += [
            [
                "answers that are in the training text as well",
                *(number(part.get("seen_share"), ".0%") for part in parts),
            ],
            ["acceleration rate on the other answers", *map(on_new_answers, parts)],
            ["predicted on other held-out answers", *(expected(part.get("new") or {}) for part in promises)],
        ]
    rows += [
        *([label, *(number(part.get(key), spec) for part in parts)] for label, key, spec in MEASURES),
        ["greedy sequences identical", *(matched(part.get("greedy_match")) for part in parts)],
    ]
    return [["", *(ENGINES[name] for name in engines)], *(row for row in rows if any(row[1:]))]


def measured(engine: Mapping[str, Any]) -> str:
    return with_error(engine.get("acceleration_rate"), engine.get("standard_error"))


def matched(match: Mapping[str, Any] | None) -> str:
    """How many greedy sequences equal plain decoding; empty where none were compared."""
    if not match:
        return ""
    parted = f", {match['ties']} parted at a tie" if match.get("ties") else ""
    return f"{match.get('identical', '?')} of {match.get('sequences', '?')}{parted}"


def by_category(report: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Native decoding by category of question, or by source of held-out prompts."""
    rows = ((report.get("check") or {}).get("native") or {}).get("categories") or ()
    names = public_names(sources)
    return [
        [
            escaped(names.get(row["category"], row["category"])),
            number(row.get("prompts")),
            number(row.get("acceleration_rate"), ".2f"),
            number(row.get("speedup"), ".2f"),
        ]
        for row in rows
    ]


def matching_references(report: Mapping[str, Any]) -> list[list[str]]:
    """The share of answers that are their question's reference, by category, under a heading; empty without any."""
    rows = (report.get("check") or {}).get("exact_match") or ()
    methods = dict.fromkeys(key for row in rows for key in row if key not in ("category", "answers"))
    cells = [
        [escaped(row["category"]), number(row["answers"]), *(number(row.get(key), ".1%") for key in methods)]
        for row in rows
    ]
    return [["category", "answers", *methods], *cells] if cells else []


def by_draft_length(report: Mapping[str, Any]) -> list[list[str]]:
    """Chains of each length: predicted, served where vLLM drafted so many, and how often vLLM accepted that token."""
    vllm = (report.get("check") or {}).get("vllm") or {}
    shares = vllm.get("accepted_per_position") or ()
    rows = []
    for row in (report.get("tree") or {}).get("chain") or ():
        length = row["draft_tokens"]
        served = measured(vllm) if length == vllm.get("num_speculative_tokens") else ""
        share = number(shares[length - 1], ".0%") if length <= len(shares) else ""
        rows.append([str(length), expected(row), served, share])
    return rows


def tops(report: Mapping[str, Any]) -> list[str]:
    keys = {key for head in report.get("heads") or () for key in head if key.startswith("top") and key[3:].isdigit()}
    return sorted(keys, key=lambda top: int(top[3:]))


def data_sets(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    return [source["hub"] for source in sources if source.get("hub")]


def sources_told(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hub data sets by name, with split and limit; local files only by number."""
    told = []
    for source in sources:
        if name := source.get("hub"):
            limit = f", at most {source['limit']:,} rows" if source.get("limit") else ""
            told.append(f"[{name}]({HUB}/datasets/{name}) (split {source.get('split') or 'train'}{limit})")
    num_local = len(sources) - len(told)
    return told + ([f"{num_local} local source(s)"] if num_local else [])


def settings(report: Mapping[str, Any], section: Mapping[str, Mapping[str, Any]], tuned: bool) -> list[tuple[str, Any]]:
    """The settings that decide what was trained, on what."""
    train, of_train = report.get("train") or {}, section["train"]
    of_kind = of_train.get(of_train.get("heads") or "") or {}
    of_backbone = (of_train.get("backbone") or {}) if tuned else {}
    found = [
        *((name, of_train.get(name)) for name in TRAIN_SETTINGS),
        *of_kind.items(),
        *((f"backbone.{name}", of_backbone.get(name)) for name in BACKBONE_SETTINGS),
        ("target's dtype", section["target"].get("dtype")),
        ("target's quantization", section["target"].get("quantization")),
        ("positions trained on", number(train.get("tokens"))),
        ("final loss", number(train.get("final_loss"), ".3f")),
        ("hardware", report.get("hardware")),
        ("versions", report.get("versions")),
    ]
    return [(name, value) for name, value in found if value not in (None, "")]


def source_names(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each source in ids and categories."""
    keys = SeedSource.model_fields.keys()
    return name_sources([SeedSource(**{key: value for key, value in each.items() if key in keys}) for each in sources])


def public_names(sources: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Each source's name, and what it may be called elsewhere."""
    names = zip(source_names(sources), sources, strict=True)
    return {name: source.get("hub") or f"local-{n}" for n, (name, source) in enumerate(names, start=1)}
