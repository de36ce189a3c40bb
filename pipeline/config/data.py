"""Settings of the target, of seeds, of generated text and of features."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from pipeline.config.running import Dtype, PlainData, Precision, Section

ENOUGH_PROMPTS = 2_000  # training prompts; from there on one answer each is text enough
FEW_PROMPTS_SAMPLES = 4  # answers to each of fewer prompts
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
        "auto", description="Weights' dtype; auto: the model's own on a GPU, float32 on a CPU."
    )
    quantization: Literal["4bit", "8bit"] | None = Field(
        None, description="Load the target through bitsandbytes in 4 or 8 bit."
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Longest conversation in tokens; never beyond the model's context, which is the"
            " default."
        ),
    )
    trust_remote_code: bool = Field(
        False, description="Run model code that comes with the weights."
    )
    chat_template: str | None = Field(
        None, description="Jinja chat template, as text or as a path; for targets that ship none."
    )
    template_arguments: PlainData = Field(
        default_factory=dict,
        description=(
            "Variables that the chat template is given, such as {enable_thinking: false} of"
            " Qwen3's."
        ),
    )
    date: datetime.date = Field(
        datetime.date(2024, 7, 26),
        description=(
            "What a chat template that asks for today's date (`strftime_now`, as Llama 3's) is"
            " told, so that a run gives the same on every day."
        ),
    )

    @field_validator("template_arguments")
    @classmethod
    def leaves_ours(cls, value: PlainData) -> PlainData:
        """Refuse settings of template arguments that every chat template is given anyway."""
        taken = sorted(value.keys() & TEMPLATE_GIVEN)
        if taken:
            raise ValueError(f"{taken[0]} is given to every template already")
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
        Field("auto", description="Form of the rows; auto tells each row by its keys.")
    )
    columns: dict[Column, str] | None = Field(
        None,
        description=(
            "Columns of other names than the forms have, such as `{prompt: question, response:"
            " answer}`; no others are read."
        ),
    )
    limit: PositiveInt | None = Field(None, description="Read at most this many rows.")
    weight: float | None = Field(
        None,
        description=(
            "Share of the mixture: conversations are taken from the sources in proportion to their"
            " weights, until one has no more. All sources have one, or none has and all are read"
            " whole."
        ),
        gt=0,
    )

    @model_validator(mode="after")
    def one_place(self) -> SeedSource:
        """Refuse the settings of a source unless it has either a path or a Hub id."""
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source has either a path or a hub id")
        return self


class SeedsConfig(Section):
    """Settings of the seeds stage: where seed conversations come from, and which are left out."""

    sources: tuple[SeedSource, ...] = Field(
        description="Where the prompts come from; `seeds.sources=PATH` is shorthand for one."
    )
    rows_per_shard: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Conversations per shard, the unit of work and of resume; an interruption costs at most"
            " those that are under way. auto: an eighth of the rows, but 16 to 512, and 512 above"
            " 4,096 rows. The number of workers does not count, so that a run goes on with more of"
            " them."
        ),
    )
    holdout: float = Field(
        0.1,
        description=(
            "Fraction never trained on: half calibrates, half checks (at least 8 rows each)."
        ),
        gt=0,
        lt=1,
    )
    near_duplicates: Literal["keep", "quarantine", "minhash"] = Field(
        "keep",
        description=(
            "What becomes of prompts that are nearly an earlier one; the same prompt a second time"
            " is always quarantined. quarantine: leave out those that differ in case, punctuation"
            " and white space alone; minhash: also similar ones."
        ),
    )
    similarity: float = Field(
        0.8,
        description=(
            "With minhash: from which share of common three words in a row on prompts are similar."
        ),
        gt=0,
        le=1,
    )
    decontaminate: bool = Field(
        True,
        description=(
            "Leave out conversations that hold a question of `check.prompts`, where that is a file."
            " A file that finds others makes other seeds, and so all that follows; with a source on"
            " the Hub every other file does."
        ),
    )
    tools: Literal["context", "cut", "quarantine"] = Field(
        "context",
        description=(
            "Turns that call functions, and their results. context: the target reads them and no"
            " head learns from them, where its chat template can render them; cut: the conversation"
            " ends before them; quarantine: it is left out."
        ),
    )
    special_tokens: Literal["escape", "keep", "quarantine"] = Field(
        "escape",
        description=(
            "Special tokens of the target in a seed's text, such as `</s>`. escape: the target"
            " reads them as text; keep: as control tokens, as servers do; quarantine: such rows are"
            " left out."
        ),
    )
    max_characters: PositiveInt = Field(
        200_000, description="Longer conversations are quarantined as too-long."
    )
    max_file_gb: float = Field(
        64, description="A file that holds more, unpacked, is refused.", gt=0
    )

    @field_validator("sources", mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """Expand a setting `seeds.sources` that is a path to a list of one source."""
        return [{"path": value}] if isinstance(value, str | Path) else value

    @field_validator("sources")
    @classmethod
    def not_empty(cls, value: tuple[SeedSource, ...]) -> tuple[SeedSource, ...]:
        """Refuse settings without a source, or with a weight for some of the sources only."""
        if not value:
            raise ValueError("name at least one source")
        if len({source.weight is None for source in value}) > 1:
            raise ValueError("give every source a weight, or none")
        return value


def without_secrets(engine_args: PlainData) -> PlainData:
    """Refuse engine settings named like secrets (`…token`): run.yaml stores every setting."""
    for name in engine_args:
        if name.endswith(("token", "password", "api_key")):
            raise ValueError(
                f"{name} would be written to run.yaml; give it in the environment (HF_TOKEN)"
                " instead"
            )
    return engine_args


EngineArgs = Annotated[PlainData, AfterValidator(without_secrets)]


class GenerateConfig(Section):
    """Settings of the generate stage, in which the target answers the seeds."""

    mode: Literal["replay", "self-talk", "passthrough"] = Field(
        "replay",
        description=(
            "replay: the seed's user turns, the target's answers; self-talk: the target writes both"
            " roles; passthrough: the seed's own answers."
        ),
    )
    engine: Literal["vllm", "transformers"] = Field("vllm", description="Which engine decodes.")
    samples: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Answers to each training prompt, every one sampled anew; held-out prompts are answered"
            " once. auto: 4, and 1 from 2,000 training conversations on."
        ),
    )
    temperature: float = Field(
        0.7, description="Sampling temperature of training rows; 0 is greedy.", ge=0
    )
    top_p: float = Field(1.0, description="Nucleus of training rows.", gt=0, le=1)
    max_new_tokens: PositiveInt = Field(1024, description="Longest answer, in tokens.")
    rounds: PositiveInt = Field(8, description="Most answers per conversation.")
    holdout_temperature: float = Field(
        0.0, description="Temperature of held-out rows; greedy predicts greedy decoding.", ge=0
    )
    on_truncated: Literal["keep", "drop-turn", "quarantine"] = Field(
        "keep", description="What becomes of an answer cut at max_new_tokens."
    )
    batch_invariant: bool = Field(
        False,
        description="vLLM's batch-invariant mode on a GPU (beta): the same tokens in any batch.",
    )
    engine_args: EngineArgs = Field(
        default_factory=dict, description="Passed to the engine as they are."
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
                "several samples of a prompt need generate.temperature above 0, and a"
                " generate.mode in which the target writes (replay or self-talk)"
            )
        return self

    def num_samples(self, num_prompts: int) -> int:
        """Return the number of answers to each of `num_prompts` training prompts.

        `auto` depends on counts alone, so that every resume agrees. The evidence is in
        docs/recipes-compared.md.
        """
        if self.samples != "auto":
            return self.samples
        if not self.can_vary or num_prompts >= ENOUGH_PROMPTS:
            return 1
        return FEW_PROMPTS_SAMPLES


class FeaturesConfig(Section):
    """Settings of the features stage, which caches the target's hidden states."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="Which engine runs the backbone."
    )
    tokens_per_batch: PositiveInt = Field(
        16_384, description="Token budget of one forward, padding included."
    )
    precision: Precision = Field(
        "native",
        description=(
            "Stored numbers: native is the target's dtype; fp8 (e4m3) and int8, with one scale per"
            " state, take half of bfloat16's bytes."
        ),
    )
    codec: Literal["none", "zstd", "lz4"] = Field(
        "none",
        description=(
            "Parquet compression of states. zstd: bfloat16 states to 0.78 of their size, float32 to"
            " 0.93, and more CPU to write and read them; lz4 finds nothing in states."
        ),
    )
    engine_args: EngineArgs = Field(default_factory=dict, description="Passed to vLLM as they are.")
