"""Settings of calibrate, export, check and push."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from pipeline.config.running import Dtype, Section

FormatName = Literal["expanded", "shared", "reference", "sglang"]
BaselineName = Literal["generate", "prompt-lookup", "assistant"]
StudyName = Literal["trees", "typical", "heads", "batch", "load"]


class LatencyLimits(Section):
    """Latency limits of requests in the study of load, in milliseconds."""

    ttft_ms: float | None = Field(
        None,
        description=(
            "The study of load counts the requests within this limit: milliseconds to the first"
            " token."
        ),
        gt=0,
    )
    tpot_ms: float | None = Field(
        None, description="The same for milliseconds per further token.", gt=0
    )


StockTree = Literal[
    "mc-sim-7b-63", "vicuna-7b-stage1", "vicuna-7b-stage1-ablation", "vicuna-7b-stage2", "vicuna-13b-stage1",  # noqa: E501
    "vicuna-13b-stage2", "vicuna-33b-stage1", "vicuna-33b-stage2", "zephyr-stage2",
]  # fmt: skip


def _are_paths(value: Any) -> bool:
    """Return whether a setting's value is a list of tree paths, and not an empty one."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        isinstance(path, list | tuple) and all(type(rank) is int for rank in path) for path in value
    )


class CalibrateConfig(Section):
    """Settings of the calibrate stage, which chooses the candidate tree and the draft length."""

    tree: Literal["static", "dynamic"] = Field(
        "static",
        description=(
            "static: one tree for every step, searched on held-out text; dynamic: in every step the"
            " nodes that the heads hold most probable (EAGLE-2's rule). Native decoding only."
        ),
    )
    nodes: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Node budget of the tree, the root not counted; auto: the size with the highest"
            " speedup, by measured overhead, where the target decodes; of sizes within 5 % of it,"
            " that with the highest speedup times acceleration rate."
        ),
    )
    depth: PositiveInt | None = Field(
        None,
        description=(
            "Deepest path. Default: what the heads can propose; of a dynamic tree train.num_heads."
        ),
    )
    top: PositiveInt = Field(
        10,
        description=(
            "Guesses per head that the tree may use; a dynamic one expands as many nodes per depth."
        ),
    )
    choices: tuple[tuple[int, ...], ...] | StockTree | Path | None = Field(
        None,
        description=(
            "Use this tree instead of searching one: a list of paths such as [[0], [0, 0], [1]], a"
            " JSON file with one, or the name of one of the Medusa authors' trees, such as"
            " vicuna-7b-stage2."
        ),
    )
    data: Path | None = Field(
        None,
        description=(
            "Measure on a file of its own instead of held-out rows: a file of conversations in any"
            " form that seeds have, whose questions the target answers greedily."
        ),
    )
    draft_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Tokens that vLLM drafts per step, a chain of first guesses: its"
            " num_speculative_tokens. auto: the number with the highest speedup by native"
            " overheads, chosen as nodes are; all the heads where nodes is a number or choices is"
            " given."
        ),
    )

    @model_validator(mode="after")
    def is_one_tree(self) -> CalibrateConfig:
        """Refuse settings that give a tree of their own and ask for a dynamic one."""
        if self.choices is not None and self.tree == "dynamic":
            raise ValueError(
                "a dynamic tree grows by itself: leave calibrate.choices out, or set"
                " calibrate.tree: static"
            )
        return self

    @field_validator("choices", mode="before")
    @classmethod
    def is_a_tree(cls, value: Any) -> Any:
        """Refuse a setting `calibrate.choices` that is neither tree paths nor a file or name."""
        if not isinstance(value, str | Path | None) and not _are_paths(value):
            raise ValueError(
                "give a list of paths such as [[0], [0, 0], [1]], a file with one, or a tree's name"
            )
        return value


class ExportConfig(Section):
    """Settings of the export stage: formats and dtype of the heads' files."""

    dtype: Dtype = Field("auto", description="Dtype of the exported heads; auto: the target's.")
    formats: tuple[FormatName, ...] = Field(
        ("expanded",),
        description=(
            "The first lies at the export's root and is checked: expanded: K lm_heads, every engine"
            " loads it; shared: one for all, smaller, where train.medusa.lm_head is tied (vLLM,"
            " TGI) or shared (vLLM). Others lie beside it in directories of their names: also"
            " reference (Medusa heads: the authors' medusa_lm_head.pt) and sglang (recurrent"
            " heads)."
        ),
        min_length=1,
    )

    @field_validator("formats")
    @classmethod
    def names_each_once(cls, value: tuple[FormatName, ...]) -> tuple[FormatName, ...]:
        """Refuse a setting that names an export format twice."""
        if len(set(value)) < len(value):
            raise ValueError("name each format once")
        return value


class CheckConfig(Section):
    """Settings of the check stage: prompts, engines, acceptance rule, studies and limits."""

    prompts: int | Path = Field(
        32,
        description=(
            "How many held-out rows, at least 1, one answer of each; or a file of questions"
            " (MT-Bench, Spec-Bench), every turn of them."
        ),
    )
    max_new_tokens: PositiveInt = Field(64, description="Tokens decoded per prompt.")
    max_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Longest prompt and answer together. Default: the model's own context, whatever"
            " target.max_tokens."
        ),
    )
    acceptance: Literal["greedy", "typical", "rejection"] = Field(
        "greedy",
        description=(
            "Rule by which candidates are accepted. greedy and rejection keep the target's own text"
            " and distribution; typical accepts more and alters it."
        ),
    )
    temperature: float = Field(
        0.0, description="Temperature of the other rules; at 0 each is greedy.", ge=0
    )
    top_p: float = Field(1.0, description="Nucleus that rejection samples from.", gt=0, le=1)
    first_token: Literal["greedy", "sampled"] = Field(
        "greedy",
        description="Typical acceptance: the token after the accepted ones; the paper's is greedy.",
    )
    typical_eps: float = Field(
        0.09, description="Typical acceptance: p > min(eps, delta exp(-H)).", gt=0, le=1
    )
    typical_delta: float = Field(
        0.3, description="Typical acceptance: delta, the paper's sqrt(eps).", gt=0
    )
    engines: tuple[Literal["native", "vllm"], ...] = Field(
        ("native", "vllm"), description="Where the export is decoded.", min_length=1
    )
    repeats: PositiveInt = Field(3, description="Timed repetitions; medians are reported.")
    baselines: tuple[BaselineName, ...] = Field(
        ("generate", "prompt-lookup"),
        description=(
            "What is measured beside it: transformers' plain generate, its prompt lookup, and a"
            " smaller model as its assistant."
        ),
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
            "Hub id or local directory of the copy that will be served, such as a GPTQ, AWQ, FP8,"
            " compressed-tensors or bitsandbytes one: the heads are checked on it as well, greedy"
            " text against it alone."
        ),
    )
    studies: tuple[StudyName, ...] = Field(
        (),
        description=(
            "Measured besides: which tree, typical acceptance by eps and temperature, how many"
            " heads, what batch size; load: vLLM as a server with 1 to 64 requests at once."
        ),
    )
    slo: LatencyLimits = Field(
        default_factory=LatencyLimits,
        description=(
            "Limits of a request; the study of load says what share of requests keeps them."
        ),
    )
    min_acceleration_rate: float = Field(
        1.0, description="The check fails where an engine is below it.", ge=0
    )
    require_learning: bool = Field(
        True,
        description=(
            "The check fails where head 0 gets less than a tenth of the held-out tokens right that"
            " guessing the most frequent ones misses."
        ),
    )
    tie_tolerance: float | None = Field(
        None,
        description=(
            "A greedy difference is a tie where the target's top-2 logits are this close; 1e-4 in"
            " float32, 0.0625 in float16 and 0.5 in bfloat16 by default, and 0.5 where it is"
            " quantized."
        ),
        ge=0,
    )
    max_tie_share: float = Field(
        0.25,
        description=(
            "The check fails where more than this share of the greedy sequences, and more than one,"
            " differ at ties: rounding explains a few."
        ),
        ge=0,
        le=1,
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def asks_something(cls, value: Any) -> Any:
        """Refuse a setting `check.prompts` that is neither a file nor a number of rows from 1."""
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, str | Path) and not (is_number and value >= 1):
            raise ValueError("ask at least one held-out row, or name a file of questions")
        return value

    @model_validator(mode="after")
    def load_is_put_on_an_engine(self) -> CheckConfig:
        """Refuse settings that ask for the study of load without vLLM."""
        if "load" in self.studies and "vllm" not in self.engines:
            raise ValueError("the study of load needs vllm in check.engines")
        return self

    @model_validator(mode="after")
    def assistant_is_named(self) -> CheckConfig:
        """Refuse settings with the baseline `assistant` but not its model, or the reverse."""
        if ("assistant" in self.baselines) != (self.assistant_model is not None):
            raise ValueError("the baseline 'assistant' and check.assistant_model come together")
        return self


class PushConfig(Section):
    """Settings of the push stage: repositories on the Hub and their cards."""

    repo_id: str | None = Field(
        None,
        description=(
            "USER/NAME on the Hub; without it no heads are pushed. `USER/` is completed from the"
            " target's name: USER/TARGET-speculator.eagle, or .medusa. With medusa-2 it is the"
            " tuned backbone's, whose heads go to NAME-speculator.medusa."
        ),
    )
    dataset: str | None = Field(
        None,
        description=(
            "USER/NAME of a data set on the Hub, to which the conversations go that the target"
            " wrote, local seeds' prompts among them; `USER/` is completed from the target's name."
        ),
    )
    private: bool = Field(False, description="Make the repositories private.")
    base_model: str | None = Field(
        None,
        description=(
            "The target's Hub id, needed for medusa-1 where target.model is a local directory."
        ),
    )
    license: str | None = Field(
        None,
        description=(
            "The Hub's identifier of the licence of heads and tuned backbone, such as apache-2.0."
            " Default: what the target's own card states."
        ),
    )

    @property
    def asks_for_something(self) -> bool:
        """Whether the settings name a repository to push to."""
        return bool(self.repo_id or self.dataset)
