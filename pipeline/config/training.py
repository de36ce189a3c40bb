"""Settings of the train stage.

Settings that only one kind of head or one training method reads are in a nested section.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.config.running import Section

Bits = Literal["4bit", "8bit"]
Layers = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
LmHead = Literal["untied", "shared", "tied"]


class MedusaConfig(Section):
    """Settings of Medusa heads."""

    num_layers: int = Field(1, description="L: residual blocks per head.", ge=1)
    lm_head: LmHead = Field(
        "untied",
        description=(
            "untied: each head trains its own copy of the target's lm_head; shared: all heads train"
            " one copy; tied: all heads use the target's lm_head, frozen."
        ),
    )


class RecurrentConfig(Section):
    """Settings of recurrent heads."""

    intermediate_size: PositiveInt | None = Field(
        None,
        description="Inner size of the cell's MLP. Default: four times the target's hidden size.",
    )


class Eagle3Config(Section):
    """Settings of EAGLE-3 heads."""

    layers: Layers | Literal["auto", "last"] = Field(
        "auto",
        description=(
            "Layers of the target that the heads read, counted from 1. auto: the paper's three"
            " layers 2, n/2 and n-3 of n; last: only the last layer, a third of the disk space."
        ),
    )
    intermediate_size: PositiveInt | None = Field(
        None,
        description="Inner size of the layer's MLP. Default: four times the target's hidden size.",
    )
    attention_heads: PositiveInt | None = Field(
        None,
        description=(
            "Query heads of the layer's attention, each of size 128, or 64 for a small target."
            " Default: as many as the hidden size holds, from 8 on a multiple of 8. They share"
            " eight key and value heads."
        ),
    )


class BackboneConfig(Section):
    """Settings of Medusa-2: the LoRA adapter of the backbone and its training."""

    recipe: Literal["joint", "two-stage"] = Field(
        "joint",
        description=(
            "joint: heads and backbone train together from the start; two-stage: the heads first"
            " train alone from cached features, as with medusa-1."
        ),
    )
    loss: Literal["kl", "ce"] = Field(
        "kl",
        description=(
            "kl: KL divergence from the original model, which keeps the backbone close to it; ce:"
            " cross entropy with the text."
        ),
    )
    schedule: Literal["sine", "linear", "constant"] = Field(
        "sine",
        description="Schedule of the heads' weight for the backbone, which ends at lambda_0.",
    )
    lambda_0: float = Field(
        0.01,
        description=(
            "Final weight of the heads' losses for the backbone. The heads themselves always"
            " learn from their full losses."
        ),
        gt=0,
        le=1,
    )
    lr: PositiveFloat = Field(
        2.5e-4,
        description=(
            "Peak learning rate of the backbone's LoRA. The default is between the paper's two,"
            " 1e-4 and 5e-4."
        ),
    )
    lora_rank: PositiveInt = Field(
        32, description="Rank of LoRA, which is on every linear layer, lm_head included."
    )
    lora_alpha: PositiveInt = Field(16, description="LoRA's scale is alpha / rank.")
    lora_dropout: float = Field(0.05, description="Dropout on the inputs of LoRA.", ge=0, lt=1)
    sequence_length: int = Field(
        2048,
        description=(
            "Maximum number of tokens in a packed sequence. Its conversations do not attend to each"
            " other; longer conversations are cut."
        ),
        ge=8,
    )
    packed_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Conversations share a sequence up to this number of tokens, at most"
            " `sequence_length`. A longer conversation has a sequence of its own. auto: shorter"
            " sequences for little text, so that there are enough steps."
        ),
    )
    batch_sequences: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Packed sequences per optimizer step, over all workers; auto: at most the paper's 128."
        ),
    )
    micro_batch: PositiveInt = Field(
        1, description="Packed sequences per forward pass; gradients accumulate over a step."
    )
    gradient_checkpointing: bool = Field(
        True,
        description=(
            "Store one hidden state per layer and recompute other activations in the backward: less"
            " memory, more time."
        ),
    )
    quantization: Literal["none", "4bit", "8bit"] | None = Field(
        None,
        description=(
            "Quantize the copy of the target that is trained (QLoRA). The adapter is merged into"
            " the target's unquantized weights. The quantized copy is the teacher too, for loss kl"
            " and for soft labels. Default: target.quantization."
        ),
    )
    shard: bool = Field(
        False,
        description=(
            "Shard the frozen layers over the workers (FSDP), for a target that does not fit on one"
            " GPU: less memory per GPU, more communication. It has no effect with one worker."
        ),
    )
    max_kl: PositiveFloat = Field(
        0.1,
        description=(
            "The check fails if the mean KL(original, tuned) on held-out positions is higher, in"
            " nats."
        ),
    )

    def quantization_beside(self, target: Bits | None) -> Bits | None:
        """Return the quantization of the backbone copy that is trained; None means unquantized.

        `target` is the setting `target.quantization`, which applies if `quantization` is not set.
        """
        if self.quantization is None:
            return target
        return None if self.quantization == "none" else self.quantization


class TrainConfig(Section):
    """Settings of the train stage: kind of heads, method, batches and optimizer."""

    heads: str = Field(
        "recurrent",
        description=(
            "Kind of head. recurrent: one cell that also reads the tokens it has proposed; more"
            " accepted tokens with fewer parameters. medusa: the paper's heads, which read only"
            " the target's state. eagle3: one decoder layer that attends to the whole text and"
            " reads several layers of the target (medusa-1 only)."
        ),
    )
    method: str = Field(
        "medusa-1",
        description=(
            "medusa-1: heads on the frozen backbone, trained on cached features; medusa-2: the"
            " backbone is trained too (LoRA), on the generated text."
        ),
    )
    num_heads: int = Field(
        5,
        description=(
            "K: the number of tokens after the next token that the heads predict; at most 128,"
            " vLLM's limit for drafts."
        ),
        ge=1,
        le=128,
    )
    epochs: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=(
            "Passes over the features (medusa-1) or the text (medusa-2). auto, here and below:"
            " computed from the number of positions, the target's hidden size and the kind of"
            " heads."
        ),
    )
    lr: PositiveFloat | Literal["auto"] = Field(
        "auto", description="Peak learning rate of the heads."
    )
    batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto", description="Positions per optimizer step on cached features, over all workers."
    )
    warmup_steps: NonNegativeInt | Literal["auto"] = Field(
        "auto", description="Steps of linear warmup, before cosine decay to 0."
    )
    patience: PositiveInt = Field(
        6,
        description=(
            "Training ends after this many successive held-out evaluations without a lower loss."
        ),
    )
    decay: float = Field(
        0.8, description="The loss of head k is weighted by decay^(k+1).", gt=0, le=1
    )
    soft_labels: float = Field(
        0.5,
        description=(
            "Share of the heads' loss that is the cross entropy with the target's distribution; the"
            " rest is the cross entropy with the generated token."
        ),
        ge=0,
        le=1,
    )
    draft_vocab: PositiveInt | None = Field(
        None,
        description=(
            "Number of tokens that heads can propose: the tokens that the target wrote most often"
            " in the train rows. The heads' lm_head has only the rows of these tokens. Recurrent"
            " heads with a draft vocabulary decode natively only. Default: all tokens."
        ),
    )
    noise: float = Field(
        0.0,
        description=(
            "Uniform noise on the states that heads read in training, at most this share of each"
            " state's RMS; EAGLE uses about 0.1."
        ),
        ge=0,
    )
    roles: tuple[Literal["assistant", "user"], ...] = Field(
        ("assistant",), description="Roles whose target-written text is learned.", min_length=1
    )
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="adamw-8bit stores the moments in 8 bit (bitsandbytes)."
    )
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Maximum norm of the gradients. Heads and backbone are clipped separately."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 on a CPU. Master weights stay fp32."
    )
    checkpoint_minutes: float = Field(
        10.0,
        description="Minutes between checkpoints, which are written in the background.",
        ge=0,
    )
    checkpoint_every: PositiveInt | None = Field(
        None, description="Steps between checkpoints, instead of checkpoint_minutes."
    )
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",),
        description=(
            "Trackers for the curves, configuration and final figures of training. Weights &"
            " Biases needs a login or WANDB_MODE=offline."
        ),
    )
    medusa: MedusaConfig = Field(
        default_factory=MedusaConfig, description="Read with train.heads: medusa."
    )
    recurrent: RecurrentConfig = Field(
        default_factory=RecurrentConfig, description="Read with train.heads: recurrent."
    )
    eagle3: Eagle3Config = Field(
        default_factory=Eagle3Config, description="Read with train.heads: eagle3."
    )
    backbone: BackboneConfig = Field(
        default_factory=BackboneConfig, description="Read with train.method: medusa-2."
    )
