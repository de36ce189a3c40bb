"""The configuration sections `target`, `seeds`, `generate` and `features`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from pipeline.config.running import Dtype, PlainData, Precision, Section

AUTO_SAMPLES = ((100, 8), (2_000, 4))
"""The rule of `generate.samples: auto`, as pairs: a number of training prompts, and the answers to
each if there are fewer. From the last number on, each prompt has one answer."""
TEMPLATE_GIVEN = {
    "messages",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
    "strftime_now",
    "tools",
}


class TargetConfig(Section):
    """Settings of `target`: the chat model that the heads accelerate."""

    model: str = Field(description="Hub id or local directory of the chat model to accelerate.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    dtype: Dtype = Field(
        "auto",
        description="Dtype of the weights; auto: the model's own on a GPU, float32 on a CPU.",
    )
    quantization: Literal["4bit", "8bit"] | None = Field(
        None, description="Load the target through bitsandbytes in 4 or 8 bit."
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Maximum length of a conversation in tokens. Default and upper limit: the model's"
            " context."
        ),
    )
    trust_remote_code: bool = Field(
        False, description="Allow model code that comes with the weights to run."
    )
    chat_template: str | None = Field(
        None,
        description="Chat template as Jinja text or the path of a file, for targets without one.",
    )
    template_arguments: PlainData = Field(
        default_factory=dict,
        description="Variables for the chat template, such as {enable_thinking: false} for Qwen3.",
    )
    date: datetime.date = Field(
        datetime.date(2024, 7, 26),
        description=(
            "Date for chat templates that ask for today's date (`strftime_now`, as in Llama 3)."
            " With a fixed date, a run gives the same result on every day."
        ),
    )

    @field_validator("template_arguments")
    @classmethod
    def leaves_ours(cls, value: PlainData) -> PlainData:
        """Refuse `target.template_arguments` with names that the pipeline itself provides."""
        taken = sorted(value.keys() & TEMPLATE_GIVEN)
        if taken:
            raise ValueError(f"every template already gets {taken[0]}")
        return value


Column = Literal[
    "conversations",
    "messages",
    "data",
    "turns",
    "prompt",
    "response",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
    "id",
    "category",
]  # what a column of a source may be


class SeedSource(Section):
    """Settings of one entry of `seeds.sources`: a file, a directory or a data set on the Hub."""

    path: Path | None = Field(
        None,
        description=(
            "A file (JSON, JSONL, text, CSV or TSV, also .gz; Parquet, Arrow) or a directory of"
            " them."
        ),
    )
    hub: str | None = Field(None, description="A data set on the Hub, streamed.")
    split: str = Field("train", description="The Hub data set's split.")
    format: Literal["auto", "sharegpt", "messages", "ultrachat", "turns", "alpaca", "prompts"] = (
        Field("auto", description="Form of the rows; auto detects it for each row by its keys.")
    )
    columns: dict[Column, str] | None = Field(
        None,
        description=(
            "Names of columns that differ from the form's, such as `{prompt: question, response:"
            " answer}`."
        ),
    )
    limit: PositiveInt | None = Field(None, description="Read at most this many rows.")

    @model_validator(mode="after")
    def one_place(self) -> SeedSource:
        """Refuse a seed source with neither a path nor a Hub id, or with both."""
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source has either a path or a hub id")
        return self


class SeedsConfig(Section):
    """Settings of the seeds stage: sources of conversations, filters, splits and shards."""

    sources: tuple[SeedSource, ...] = Field(
        description="Sources of the prompts; `seeds.sources=PATH` is shorthand for one source."
    )
    rows_per_shard: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Conversations per shard, the unit of work and of resume. auto: an eighth of the"
            " rows, at least 16 and at most 512."
        ),
    )
    holdout: float = Field(
        0.1,
        description=(
            "Fraction of the rows that is never trained on: half for calibrate, half for check."
            " With up to 4,096 rows, each half has at least 8 rows, and at least a twentieth of"
            " the rows up to 32."
        ),
        gt=0,
        lt=1,
    )
    decontaminate: bool = Field(
        True,
        description=(
            "Quarantine conversations that contain a question of `check.prompts`, if that is a"
            " file. If another file changes the seeds, all stages run again. With a source on the"
            " Hub, every change of the file changes the seeds."
        ),
    )
    special_tokens: Literal["escape", "keep"] = Field(
        "escape",
        description=(
            "Special tokens of the target in a seed's text, such as `</s>`. escape: the target"
            " reads these tokens as text; keep: the target reads them as control tokens, as on"
            " servers."
        ),
    )

    @field_validator("sources", mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """Replace a single path as `seeds.sources` by a list with one source."""
        return [{"path": value}] if isinstance(value, str | Path) else value

    @field_validator("sources")
    @classmethod
    def not_empty(cls, value: tuple[SeedSource, ...]) -> tuple[SeedSource, ...]:
        """Refuse an empty `seeds.sources`."""
        if not value:
            raise ValueError("set at least one source")
        return value


def without_secrets(engine_args: PlainData) -> PlainData:
    """Refuse engine arguments named like a secret (`…token`), since run.yaml would store them.

    Returns the arguments unchanged. Raises ValueError, which pydantic reports.
    """
    for name in engine_args:
        if name.endswith(("token", "password", "api_key")):
            raise ValueError(
                f"{name} would be written to run.yaml; set it in the environment (HF_TOKEN) instead"
            )
    return engine_args


EngineArgs = Annotated[PlainData, AfterValidator(without_secrets)]


class GenerateConfig(Section):
    """Settings of the generate stage, in which the target writes its answers."""

    mode: Literal["replay", "self-talk", "passthrough"] = Field(
        "replay",
        description=(
            "replay: the target answers the seed's user turns; self-talk: the target writes both"
            " roles; passthrough: the seed's answers are kept."
        ),
    )
    engine: Literal["vllm", "transformers"] = Field("vllm", description="Engine that generates.")
    samples: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Answers to each training prompt; held-out prompts have one answer. auto: 8 below 100"
            " training conversations, 4 below 2,000, and 1 from 2,000 on."
        ),
    )
    temperature: float = Field(
        0.7,
        description="Sampling temperature of training rows; 0 is greedy. See also `greedy_first`.",
        ge=0,
    )
    greedy_first: bool = Field(
        True,
        description=(
            "Write the first of several answers to a training prompt greedily. This raises the"
            " acceleration rate of greedy decoding."
        ),
    )
    top_p: float = Field(1.0, description="Top-p of training rows.", gt=0, le=1)
    max_new_tokens: PositiveInt = Field(1024, description="Maximum length of an answer in tokens.")
    rounds: PositiveInt = Field(8, description="Maximum number of answers per conversation.")
    holdout_temperature: float = Field(
        0.0,
        description="Sampling temperature of held-out rows; 0 is greedy.",
        ge=0,
    )
    on_truncated: Literal["keep", "drop-turn", "quarantine"] = Field(
        "keep",
        description="How to treat an answer that is cut at max_new_tokens.",
    )
    engine_args: EngineArgs = Field(
        default_factory=dict, description="Arguments that are passed to the engine unchanged."
    )

    @property
    def can_vary(self) -> bool:
        """Whether two answers to one prompt can differ with these settings."""
        return self.mode != "passthrough" and self.temperature > 0

    @model_validator(mode="after")
    def samples_differ(self) -> GenerateConfig:
        """Refuse settings that ask for several samples which would all be alike."""
        if self.samples not in ("auto", 1) and not self.can_vary:
            raise ValueError(
                "generate.samples above 1 needs generate.temperature above 0, and generate.mode"
                " replay or self-talk"
            )
        return self

    def num_samples(self, num_prompts: int) -> int:
        """Return the number of answers to each of `num_prompts` training prompts.

        `auto` depends only on the settings and this number, so that every resume agrees. The
        evidence is in docs/which-heads.md.
        """
        if self.samples != "auto":
            return self.samples
        if not self.can_vary:
            return 1
        for enough_prompts, samples in AUTO_SAMPLES:
            if num_prompts < enough_prompts:
                return samples
        return 1

    def temperatures(self, samples: int) -> list[float]:
        """Return the sampling temperature of each of `samples` answers to a training prompt."""
        temperatures = [self.temperature] * samples
        if self.greedy_first and samples > 1:
            temperatures[0] = 0.0
        return temperatures


class FeaturesConfig(Section):
    """Settings of the features stage, which caches the target's hidden states."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="Engine that runs the backbone."
    )
    tokens_per_batch: PositiveInt = Field(
        16_384, description="Maximum number of tokens per forward pass, padding included."
    )
    precision: Precision = Field(
        "native",
        description=(
            "Format of the stored states. native: the target's dtype; fp8 (e4m3, with one scale"
            " per state) takes half the space of bfloat16."
        ),
    )
    engine_args: EngineArgs = Field(
        default_factory=dict, description="Arguments that are passed to vLLM unchanged."
    )
