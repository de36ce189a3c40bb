"""Typed configuration: every key, its meaning, its default. `configuration.py` reads it from YAML and the command line.

Settings are data: frozen, strict (an unknown key is an error), and each key is read somewhere. The descriptions here
are the reference; the README's table of keys is made from them, and a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BaselineName = Literal["generate", "prompt-lookup", "assistant"]
StudyName = Literal["trees", "typical", "heads", "batch"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def nothing_is_the_defaults(cls, value: Any) -> Any:
        """A section whose every line is commented out."""
        return {} if value is None else value


class RunConfig(Section):
    name: str = Field(
        description="Name of the run; its directory is root/name.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    root: Path = Field(Path("~/medusa-runs"), description="Directory of all runs; on storage that every worker sees.")
    store: Path | None = Field(
        None,
        description="Where stage directories live; runs that name one store share them. Default: the run directory.",
    )
    seed: int = Field(0, description="Seed of sampling, splits and training.", ge=0)

    @field_validator("root", "store")
    @classmethod
    def home(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    @property
    def directory(self) -> Path:
        return self.root / self.name


class TargetConfig(Section):
    model: str = Field(description="Hub id or local directory of the chat model to accelerate.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    dtype: Dtype = Field("auto", description="Weights' dtype; auto: the model's own on a GPU, float32 on a CPU.")
    quantization: Literal["4bit", "8bit"] | None = Field(
        None, description="Load the target through bitsandbytes in 4 or 8 bit."
    )
    max_tokens: PositiveInt | None = Field(
        None, description="Longest conversation in tokens; never beyond the model's context, which is the default."
    )
    trust_remote_code: bool = Field(False, description="Run model code that comes with the weights.")
    chat_template: str | None = Field(
        None, description="Jinja chat template, as text or as a path; for targets that ship none."
    )


class SeedSource(Section):
    path: Path | None = Field(None, description="A file (JSON, JSONL, text, also .gz) or a directory of them.")
    hub: str | None = Field(None, description="A data set on the Hub, streamed.")
    split: str = Field("train", description="The Hub data set's split.")
    format: Literal["auto", "sharegpt", "ultrachat", "messages", "turns", "prompts"] = Field(
        "auto", description="Form of the rows; auto tells each row by its keys."
    )
    limit: PositiveInt | None = Field(None, description="Read at most this many rows.")

    @model_validator(mode="after")
    def one_place(self) -> SeedSource:
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source has either a path or a hub id")
        return self


class SeedsConfig(Section):
    sources: tuple[SeedSource, ...] = Field(
        description="Where the prompts come from; `seeds.sources=PATH` is shorthand for one."
    )
    rows_per_shard: PositiveInt = Field(512, description="Conversations per shard, the unit of work and of resume.")
    holdout: float = Field(
        0.1, description="Fraction never trained on: half calibrates, half checks (at least 8 rows each).", gt=0, lt=1
    )
    max_characters: PositiveInt = Field(200_000, description="Longer conversations are quarantined as too-long.")

    @field_validator("sources", mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        return [{"path": value}] if isinstance(value, str | Path) else value

    @field_validator("sources")
    @classmethod
    def not_empty(cls, value: tuple[SeedSource, ...]) -> tuple[SeedSource, ...]:
        if not value:
            raise ValueError("name at least one source")
        return value


def without_secrets(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Refuse what must not stand in a run's files, where every setting does."""
    for name in engine_args:
        if name.endswith(("token", "password", "api_key")):
            raise ValueError(f"{name} would be written to run.yaml; give it in the environment (HF_TOKEN) instead")
    return engine_args


EngineArgs = Annotated[dict[str, Any], AfterValidator(without_secrets)]


class GenerateConfig(Section):
    mode: Literal["replay", "self-talk", "passthrough"] = Field(
        "replay",
        description="replay: the seed's user turns, the target's answers; self-talk: the target writes both roles; "
        "passthrough: the seed's own answers.",
    )
    engine: Literal["vllm", "transformers"] = Field("vllm", description="Which engine decodes.")
    temperature: float = Field(0.7, description="Sampling temperature of training rows; 0 is greedy.", ge=0)
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
        False, description="vLLM's batch-invariant mode on a GPU (beta): the same tokens in any batch."
    )
    engine_args: EngineArgs = Field(default_factory=dict, description="Passed to the engine as they are.")


class FeaturesConfig(Section):
    engine: Literal["transformers", "vllm"] = Field("transformers", description="Which engine runs the backbone.")
    tokens_per_batch: PositiveInt = Field(16_384, description="Token budget of one forward, padding included.")
    codec: Literal["zstd", "lz4", "none"] = Field("zstd", description="Parquet compression of the states.")
    engine_args: EngineArgs = Field(default_factory=dict, description="Passed to vLLM as they are.")


class TrainConfig(Section):
    method: Literal["medusa-1", "medusa-2"] = Field(
        "medusa-1",
        description="medusa-1: heads on the frozen backbone, from the cache; medusa-2: the backbone learns along "
        "(LoRA), from the generated text.",
    )
    num_heads: int = Field(5, description="K: how many tokens ahead of the next the heads guess.", ge=1)
    num_layers: int = Field(1, description="L: residual blocks per head.", ge=1)
    lm_head: Literal["untied", "tied"] = Field(
        "untied", description="untied: each head trains its own copy; tied: all share the target's, frozen."
    )
    decay: float = Field(0.8, description="Head k's loss weighs decay^(k+1).", gt=0, le=1)
    roles: tuple[Literal["assistant", "user"], ...] = Field(
        ("assistant",), description="Whose target-written text is learned.", min_length=1
    )
    lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the heads.")
    epochs: PositiveInt = Field(2, description="Passes over the features, and over the text.")
    batch_tokens: PositiveInt = Field(16_384, description="Positions per optimizer step, over all workers.")
    warmup_steps: int = Field(40, description="Linear warmup; then cosine to 0.", ge=0)
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="adamw-8bit keeps its moments in 8 bit (bitsandbytes)."
    )
    weight_decay: float = Field(0.0, description="AdamW's weight decay.", ge=0)
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradient clipping by global norm.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 on a CPU. Master weights stay fp32."
    )
    checkpoint_every: PositiveInt = Field(200, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="How many of the newest checkpoints stay on disk.")
    recipe: Literal["joint", "two-stage"] = Field(
        "joint",
        description="medusa-2: joint: heads and backbone from the start; two-stage: the heads first, from the cache, "
        "as medusa-1 trains them.",
    )
    backbone_loss: Literal["kl", "ce"] = Field(
        "kl",
        description="medusa-2: kl: the backbone stays close to the original model; ce: it learns the text as hard "
        "labels.",
    )
    schedule: Literal["sine", "linear", "constant"] = Field(
        "sine", description="medusa-2: how the weight of the heads' losses rises to lambda_0 over the training."
    )
    lambda_0: float = Field(0.01, description="medusa-2: final weight of the heads' losses.", gt=0, le=1)
    lora_rank: PositiveInt = Field(32, description="medusa-2: rank of LoRA, on every linear layer, lm_head included.")
    lora_alpha: PositiveInt = Field(16, description="medusa-2: LoRA's scale is alpha / rank.")
    lora_dropout: float = Field(0.05, description="medusa-2: dropout before LoRA.", ge=0, lt=1)
    backbone_lr: PositiveFloat | None = Field(
        None, description="medusa-2: peak learning rate of LoRA. Default: a quarter of train.lr."
    )
    sequence_length: int = Field(
        2048,
        description="medusa-2: conversations are packed into sequences of so many tokens, none seeing another; what is "
        "longer is cut.",
        ge=8,
    )
    batch_sequences: PositiveInt = Field(
        128, description="medusa-2: packed sequences per optimizer step, over all workers."
    )
    micro_batch: PositiveInt = Field(1, description="medusa-2: sequences of one forward; the others accumulate.")
    gradient_checkpointing: bool = Field(
        True, description="medusa-2: keep one state per layer and compute the others again: less memory, more time."
    )
    max_kl: PositiveFloat = Field(
        0.1, description="medusa-2: the check fails where KL(original, tuned) is above, in nats per held-out position."
    )

    @property
    def peak_backbone_lr(self) -> float:
        """A quarter of the heads' unless it is given: theirs is 4 times the backbone's (paper, appendix B)."""
        return self.lr / 4 if self.backbone_lr is None else self.backbone_lr


class CalibrateConfig(Section):
    nodes: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Node budget of the tree, the root not counted; auto: the size with the highest speedup, by "
        "measured overhead, where the target decodes.",
    )
    depth: PositiveInt | None = Field(None, description="Deepest path. Default: the number of heads.")
    top: PositiveInt = Field(10, description="Guesses per head that the tree may use.")
    choices: Path | None = Field(None, description="A JSON list of paths: use this tree instead of searching one.")


class ExportConfig(Section):
    dtype: Dtype = Field("auto", description="Dtype of the exported heads; auto: the target's.")
    formats: tuple[Literal["expanded", "shared"], ...] = Field(
        ("expanded",),
        description="expanded: K lm_heads, every engine loads it; shared: one for tied heads, smaller (vLLM, TGI).",
        min_length=1,
        max_length=1,
    )


class CheckConfig(Section):
    prompts: int | Path = Field(
        32,
        description="How many held-out rows, at least 1, one answer of each; or a file of questions (MT-Bench, "
        "Spec-Bench), every turn of them.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Tokens decoded per prompt.")
    acceptance: Literal["greedy", "typical", "nucleus", "rejection"] = Field(
        "greedy",
        description="Rule by which candidates are accepted. greedy and rejection keep the target's own text and "
        "distribution; typical and nucleus accept more and alter it.",
    )
    temperature: float = Field(0.0, description="Temperature of the other rules; at 0 each is greedy.", ge=0)
    top_p: float = Field(1.0, description="Nucleus of the nucleus rule (below 1) and of rejection.", gt=0, le=1)
    first_token: Literal["greedy", "sampled"] = Field(
        "greedy", description="Typical acceptance: the token after the accepted ones; the paper's is greedy."
    )
    typical_eps: float = Field(0.09, description="Typical acceptance: p > min(eps, delta exp(-H)).", gt=0, le=1)
    typical_delta: float = Field(0.3, description="Typical acceptance: delta, the paper's sqrt(eps).", gt=0)
    engines: tuple[Literal["native", "vllm"], ...] = Field(
        ("native", "vllm"), description="Where the export is decoded.", min_length=1
    )
    repeats: PositiveInt = Field(3, description="Timed repetitions; medians are reported.")
    baselines: tuple[BaselineName, ...] = Field(
        ("generate", "prompt-lookup"),
        description="What transformers itself makes of the prompts, beside it: plain generate, prompt lookup, a "
        "smaller model as assistant.",
    )
    assistant_model: str | None = Field(
        None, description="Hub id or local directory of the assistant, a model with the target's vocabulary."
    )
    studies: tuple[StudyName, ...] = Field(
        (),
        description="Asked beyond the verdict: which tree, typical acceptance by eps and temperature, how many heads, "
        "what batch size.",
    )
    min_acceleration_rate: float = Field(1.0, description="The check fails below it.", ge=0)
    tie_tolerance: float | None = Field(
        None,
        description="A greedy difference is a tie where the target's top-2 logits are this close; 1e-4 in float32, "
        "0.0625 in float16 and 0.5 in bfloat16 by default.",
        ge=0,
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def asks_something(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, str | Path) and not (is_number and value >= 1):
            raise ValueError("ask at least one held-out row, or name a file of questions")
        return value

    @model_validator(mode="after")
    def assistant_is_named(self) -> CheckConfig:
        if ("assistant" in self.baselines) != (self.assistant_model is not None):
            raise ValueError("the baseline 'assistant' and check.assistant_model come together")
        return self


class PushConfig(Section):
    repo_id: str | None = Field(
        None,
        description="USER/NAME on the Hub; without it nothing is pushed. With medusa-2 the tuned backbone's, whose "
        "heads go to NAME-medusa.",
    )
    private: bool = Field(False, description="Make the repository private.")
    base_model: str | None = Field(
        None, description="The target's Hub id, needed for medusa-1 where target.model is a local directory."
    )


class PlacementOf(Section):
    workers: PositiveInt = Field(1, description="Worker processes.")
    gpus_per_worker: int | None = Field(
        None, description="GPUs of each; default 1 where the cluster has GPUs, else 0.", ge=0
    )
    cpus_per_worker: PositiveInt | None = Field(None, description="CPU cores of each; default: an equal share.")


class PlacementConfig(Section):
    generate: PlacementOf = Field(default_factory=PlacementOf, description="Workers of generate.")
    features: PlacementOf = Field(default_factory=PlacementOf, description="Workers of features.")
    train: PlacementOf = Field(default_factory=PlacementOf, description="Workers of train.")


class LimitsConfig(Section):
    max_quarantine_fraction: float = Field(
        0.2, description="A stage stops (exit 3) when it refuses more; duplicates do not count.", ge=0, le=1
    )
    min_free_disk_gb: float = Field(1.0, description="A stage stops (exit 4) before the disk has less.", ge=0)
    max_consecutive_failures: PositiveInt = Field(
        3,
        description="A stage stops when a shard fails this often; one that ends its worker's process this often is "
        "searched for the rows that do it, which are quarantined.",
    )
    max_hours_per_shard: float = Field(
        6.0, description="A worker that takes longer for one shard is ended, and the shard given to another.", gt=0
    )


class Config(Section):
    run: RunConfig
    target: TargetConfig
    seeds: SeedsConfig
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    features: FeaturesConfig = Field(default_factory=FeaturesConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    calibrate: CalibrateConfig = Field(default_factory=CalibrateConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    check: CheckConfig = Field(default_factory=CheckConfig)
    push: PushConfig = Field(default_factory=PushConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
