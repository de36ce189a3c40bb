"""The configuration sections `calibrate`, `export`, `check`, `report` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.running import Section

FormatName = Literal["expanded", "shared"]
BaselineName = Literal["generate", "prompt-lookup", "assistant", "retrieval"]
EngineBaseline = Literal["ngram", "draft-model"]
StudyName = Literal["load"]


Paths = Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)]


class CalibrateConfig(Section):
    """Settings of the calibrate stage: candidate tree and number of draft tokens."""

    tree: Literal["static", "dynamic"] = Field(
        "static",
        description=(
            "static: one tree for all steps, searched on held-out text; dynamic: in each step the"
            " nodes that the heads consider most probable (EAGLE-2), in native decoding only."
        ),
    )
    nodes: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Nodes of the tree, without the root. auto: the size with the highest speedup, by the"
            " overhead measured on the target's device. Among sizes within 5 % of that speedup,"
            " the highest product of speedup and acceleration rate decides."
        ),
    )
    depth: PositiveInt | None = Field(
        None,
        description=(
            "Maximum depth of the tree. Default: as deep as the heads can propose; for a dynamic"
            " tree, train.num_heads."
        ),
    )
    top: PositiveInt = Field(
        10,
        description=(
            "Guesses per head that the tree may use; a dynamic tree also expands at most this many"
            " nodes per depth."
        ),
    )
    choices: Paths | Path | None = Field(
        None,
        description=(
            "Tree to use instead of a searched one: a list of paths such as [[0], [0, 0], [1]], or"
            " a JSON file with such a list."
        ),
    )
    draft_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Tokens that vLLM drafts per step (num_speculative_tokens), a chain of the heads'"
            " first guesses. auto: chosen by the same rule as `nodes`; one token per head if"
            " `choices` is set."
        ),
    )

    @model_validator(mode="after")
    def is_one_tree(self) -> CalibrateConfig:
        """Refuse `calibrate.choices` together with a dynamic tree."""
        if self.choices is not None and self.tree == "dynamic":
            raise ValueError(
                "a dynamic tree takes no calibrate.choices: remove them, or set calibrate.tree:"
                " static"
            )
        return self


class ExportConfig(Section):
    """Settings of the export stage."""

    formats: tuple[FormatName, ...] = Field(
        ("expanded",),
        description=(
            "The first format is written to the export's root and is checked: expanded: K lm_heads,"
            " which every engine loads; shared: one lm_head for all heads, smaller, if"
            " train.medusa.lm_head is tied (vLLM, TGI) or shared (vLLM). A second format is"
            " written to a subdirectory of its name."
        ),
        min_length=1,
    )


class CheckConfig(Section):
    """Settings of the check stage: prompts, engines, acceptance rule, studies and limits."""

    prompts: PositiveInt | Path = Field(
        32,
        description=(
            "Number of held-out conversations, with one answer each; every source and category"
            " has its share. Or a file of questions (MT-Bench, Spec-Bench); the check asks every"
            " turn."
        ),
    )
    max_new_tokens: PositiveInt = Field(
        128, description="Maximum number of tokens decoded per prompt."
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Maximum length of prompt and answer together, in tokens. Default: the model's own"
            " context, also if target.max_tokens is shorter."
        ),
    )
    acceptance: Literal["greedy", "typical", "rejection"] = Field(
        "greedy",
        description=(
            "Rule that accepts candidates. greedy keeps the target's greedy text, rejection its"
            " distribution; typical accepts more tokens and changes the distribution."
        ),
    )
    temperature: float = Field(
        0.0,
        description="Temperature of typical acceptance and rejection; at 0 both are greedy.",
        ge=0,
    )
    top_p: float = Field(1.0, description="Top-p of rejection sampling.", gt=0, le=1)
    typical_eps: float = Field(
        0.09,
        description="Typical acceptance: eps in p > min(eps, sqrt(eps) exp(-H)).",
        gt=0,
        le=1,
    )
    engines: tuple[Literal["native", "vllm"], ...] = Field(
        ("native", "vllm"), description="Engines in which the export is decoded.", min_length=1
    )
    repeats: PositiveInt = Field(
        3,
        description="Timed repetitions. The report shows the median; in the study `load`, the"
        " fastest.",
    )
    baselines: tuple[BaselineName, ...] = Field(
        ("generate", "prompt-lookup"),
        description=(
            "Methods to compare the heads with: transformers' plain generate, its prompt lookup,"
            " its assisted generation with a smaller model, and retrieval from the run's training"
            " text (REST)."
        ),
    )
    engine_baselines: tuple[EngineBaseline, ...] = Field(
        ("ngram",),
        description=(
            "Drafts without training to compare the heads with in vLLM: n-grams of the context, or"
            " a smaller model (assistant_model)."
        ),
    )
    draft_tokens: tuple[PositiveInt, ...] = Field(
        (),
        description=(
            "Further numbers of tokens that vLLM drafts with the heads, at most three. The report"
            " says which number is fastest."
        ),
        max_length=3,
    )
    assistant_model: str | None = Field(
        None,
        description=(
            "Hub id or local directory of the assistant, a model with the target's vocabulary."
        ),
    )
    served_model: str | None = Field(
        None,
        description=(
            "Hub id or local directory of the quantized copy of the target that you will serve."
            " The heads are also checked on this copy, and its greedy text is compared with its"
            " own plain decoding."
        ),
    )
    studies: tuple[StudyName, ...] = Field(
        (),
        description="Further measurements. load: vLLM as a server with 1 to 64 requests at once.",
    )
    min_acceleration_rate: float = Field(
        1.0,
        description=(
            "The check fails if an engine's acceleration rate is lower. At 0, heads that have"
            " learned nothing pass too."
        ),
        ge=0,
    )
    tie_tolerance: float | None = Field(
        None,
        description=(
            "A greedy difference is a tie if both tokens are this close to the target's best logit."
            " Default: twice the largest change of a logit that the check measures between forward"
            " passes over the same text in different shapes."
        ),
        ge=0,
    )
    max_tie_share: float = Field(
        0.02,
        description=(
            "The check fails if ties exceed this share of the greedy tokens compared, and there"
            " is more than one tie. The tokens of an answer count up to its first difference."
        ),
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def load_is_put_on_an_engine(self) -> CheckConfig:
        """Refuse the study `load` in `check.studies` without vLLM in `check.engines`."""
        if "load" in self.studies and "vllm" not in self.engines:
            raise ValueError("the study of load needs vllm in check.engines")
        return self

    @model_validator(mode="after")
    def assistant_is_named(self) -> CheckConfig:
        """Refuse a baseline with an assistant without `check.assistant_model`, and the reverse."""
        used = "assistant" in self.baselines or "draft-model" in self.engine_baselines
        if used != (self.assistant_model is not None):
            raise ValueError(
                "check.assistant_model and the baselines 'assistant' and 'draft-model' come"
                " together"
            )
        return self


class ReportConfig(Section):
    """Settings of the run's report."""

    show_text: bool = Field(
        True,
        description=(
            "Show two answers of the check in report.html, with the last 200 characters of their"
            " prompts. Set false if they are private. report.md, report.json and model cards never"
            " contain text of the data."
        ),
    )


class PushConfig(Section):
    """Settings of the push stage: repositories on the Hub and their cards."""

    repo_id: str | None = Field(
        None,
        description=(
            "USER/NAME on the Hub; without it no heads are pushed. `USER/` is completed to"
            " USER/TARGET-speculator.eagle, .eagle3 or .medusa. With medusa-2 this repository gets"
            " the tuned backbone, and the heads go to NAME-speculator.medusa or .eagle."
        ),
    )
    private: bool = Field(False, description="Make the repositories private.")
    base_model: str | None = Field(
        None,
        description=(
            "Hub id of the target, needed for medusa-1 if target.model is a local directory."
        ),
    )
    license: str | None = Field(
        None,
        description=(
            "Licence of the heads and the tuned backbone as the Hub's identifier, such as"
            " apache-2.0. Default: the licence in the target's card."
        ),
    )
