"""Settings of training: of heads, and of the backbone with them.

What only one kind of head or one method reads is a section of its own, named after it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.config.running import Section

Bits = Literal["4bit", "8bit"]
LmHead = Literal["untied", "shared", "tied"]


class MedusaConfig(Section):
    """Settings of Medusa heads."""

    num_layers: int = Field(1, description="L: residual blocks per head.", ge=1)
    lm_head: LmHead = Field(
        "untied",
        description=(
            "untied: each head trains its own copy; shared: all heads train one; tied: all read the"
            " target's, frozen."
        ),
    )


class RecurrentConfig(Section):
    """Settings of recurrent heads."""

    intermediate_size: PositiveInt | None = Field(
        None,
        description="Inner size of the cell's MLP. Default: four times the target's hidden size.",
    )


class BackboneConfig(Section):
    """Settings of Medusa-2: the LoRA adapter of the backbone and its training."""

    recipe: Literal["joint", "two-stage"] = Field(
        "joint",
        description=(
            "joint: heads and backbone from the start; two-stage: the heads first, from the cache,"
            " as medusa-1 trains them."
        ),
    )
    loss: Literal["kl", "ce"] = Field(
        "kl",
        description=(
            "kl: the backbone stays close to the original model; ce: it learns the text as hard"
            " labels."
        ),
    )
    schedule: Literal["sine", "linear", "constant"] = Field(
        "sine",
        description="How the weight of the heads' losses rises to lambda_0 over the training.",
    )
    lambda_0: float = Field(0.01, description="Final weight of the heads' losses.", gt=0, le=1)
    lr: PositiveFloat | None = Field(
        None,
        description="Peak learning rate of the backbone's LoRA. Default: a quarter of the heads'.",
    )
    lora_rank: PositiveInt = Field(
        32, description="Rank of LoRA, on every linear layer, lm_head included."
    )
    lora_alpha: PositiveInt = Field(16, description="LoRA's scale is alpha / rank.")
    lora_dropout: float = Field(0.05, description="Dropout before LoRA.", ge=0, lt=1)
    sequence_length: int = Field(
        2048,
        description=(
            "Conversations are packed into sequences of so many tokens, none seeing another; what"
            " is longer is cut."
        ),
        ge=8,
    )
    batch_sequences: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Packed sequences per optimizer step, over all workers; auto: at most the paper's 128."
        ),
    )
    micro_batch: PositiveInt = Field(
        1, description="Sequences of one forward; the others accumulate."
    )
    gradient_checkpointing: bool = Field(
        True,
        description=(
            "Keep one state per layer and compute the others again: less memory, more time."
        ),
    )
    quantization: Literal["none", "4bit", "8bit"] | None = Field(
        None,
        description=(
            "Hold the copy that trains in 4 or 8 bit (QLoRA), and nothing else: what is published"
            " is the target's own weights and what was learned. With kl that copy is the teacher"
            " too. Default: target.quantization."
        ),
    )
    shard: bool = Field(
        False,
        description=(
            "Split the frozen layers over the workers (FSDP) where one GPU does not hold the"
            " target: each keeps its part, and gathers each layer in every forward and backward."
            " Less memory, more traffic; one worker keeps all."
        ),
    )
    max_kl: PositiveFloat = Field(
        0.1,
        description=(
            "The check fails where KL(original, tuned) is above, in nats per held-out position."
        ),
    )

    def peak_lr(self, heads_lr: float) -> float:
        """Return the configured peak learning rate of the backbone, by default `heads_lr` / 4.

        The default is that of the paper's appendix B.
        """
        return heads_lr / 4 if self.lr is None else self.lr

    def quantization_beside(self, target: Bits | None) -> Bits | None:
        """Return the configured quantization of the backbone's trained copy; None for none.

        Without a setting of its own it is `target`, the setting `target.quantization`.
        """
        if self.quantization is None:
            return target
        return None if self.quantization == "none" else self.quantization


class TrainConfig(Section):
    """Settings of the train stage: kind of heads, method, batches and optimizer."""

    heads: str = Field(
        "recurrent",
        description=(
            "Kind of head; recurrent: one cell that also reads the tokens it has guessed, and"
            " accepts more with fewer parameters; medusa: the paper's, each of which guesses from"
            " the target's state alone."
        ),
    )
    method: str = Field(
        "medusa-1",
        description=(
            "medusa-1: heads on the frozen backbone, from the cache; medusa-2: the backbone learns"
            " along (LoRA), from the generated text."
        ),
    )
    num_heads: int = Field(
        5,
        description=(
            "K: how many tokens ahead of the next the heads guess; at most 128, as many as vLLM"
            " drafts."
        ),
        ge=1,
        le=128,
    )
    epochs: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Passes over the features, and over the text. auto, here and below: chosen from the"
            " number of positions and the target's width."
        ),
    )
    lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="Peak learning rate of the heads."
    )
    batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto", description="Positions per optimizer step from the cache, over all workers."
    )
    warmup_steps: NonNegativeInt | Literal["auto"] = Field(
        "auto", description="Linear warmup; then cosine to 0."
    )
    patience: PositiveInt = Field(
        6,
        description=(
            "Training ends after so many evaluations on held-out rows without a lower loss."
        ),
    )
    decay: float = Field(0.8, description="Head k's loss weighs decay^(k+1).", gt=0, le=1)
    soft_labels: float = Field(
        0.5,
        description=(
            "The share of the heads' loss that is the cross entropy with the target's own"
            " distribution; the rest is that with the token that was written."
        ),
        ge=0,
        le=1,
    )
    draft_vocab: PositiveInt | None = Field(
        None,
        description=(
            "Let heads propose only so many tokens, the most frequent of what the target wrote in"
            " the train rows: lm_head has a row for each. Recurrent heads then decode natively"
            " only. Default: all tokens."
        ),
    )
    noise: float = Field(
        0.0,
        description=(
            "Uniform noise on the states that heads read in training, up to this share of each"
            " state's RMS; EAGLE's is about 0.1."
        ),
        ge=0,
    )
    roles: tuple[Literal["assistant", "user"], ...] = Field(
        ("assistant",), description="Whose target-written text is learned.", min_length=1
    )
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="adamw-8bit keeps its moments in 8 bit (bitsandbytes)."
    )
    weight_decay: float = Field(0.0, description="AdamW's weight decay.", ge=0)
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradient clipping by global norm.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 on a CPU. Master weights stay fp32."
    )
    checkpoint_minutes: float = Field(
        10.0,
        description=(
            "Minutes between checkpoints: what a kill costs at most. They are written in the"
            " background."
        ),
        ge=0,
    )
    checkpoint_every: PositiveInt | None = Field(
        None, description="Steps between checkpoints, in place of checkpoint_minutes."
    )
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        ("tensorboard",),
        description=(
            "Where training's curves, configuration and final figures are watched, by each one's"
            " own library. Trackio is local; Weights & Biases asks for a login, or for"
            " WANDB_MODE=offline."
        ),
    )
    keep_checkpoints: PositiveInt = Field(
        2, description="How many of the newest checkpoints stay on disk."
    )
    medusa: MedusaConfig = Field(
        default_factory=MedusaConfig, description="Read with train.heads: medusa."
    )
    recurrent: RecurrentConfig = Field(
        default_factory=RecurrentConfig, description="Read with train.heads: recurrent."
    )
    backbone: BackboneConfig = Field(
        default_factory=BackboneConfig, description="Read with train.method: medusa-2."
    )
