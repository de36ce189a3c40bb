"""The backbone that Medusa-2 trains: the target with a LoRA adapter, optionally sharded.

With the adapter off, the model is the original. In training the lm_head never runs as a layer,
because the losses compute its logits in chunks (`pipeline.training.backbone_losses`).

Letters: B sequences, T tokens, N learned positions, D hidden size, V vocabulary, R rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import BackboneConfig
from pipeline.errors import ConfigError
from pipeline.export.backbone import GENERATION_FILE, write_backbone
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.heads.kind import TargetWeights
from pipeline.heads.losses import TargetHead
from pipeline.storage.atomic import disk_errors
from pipeline.storage.fingerprint import FileFacts
from pipeline.targets import files
from pipeline.targets.files import find_file, is_local
from pipeline.targets.loading import input_device, load_causal_lm, verify_tap
from pipeline.targets.lora import HEADS_ALONE, add_lora, decoder_layers, load_tuned
from pipeline.targets.spec import TargetSpec, load_tokenizer
from pipeline.training.task import ALONE, Workers
from pipeline.training.text_batches import TextBatch

NAME = "default"  # peft's name for the adapter
SAVES_MEMORY = (
    "Set train.backbone.shard: true with several workers, or train.backbone.quantization: 4bit."
)


class Backbone(nn.Module):
    """The target model with a trainable LoRA adapter, for Medusa-2.

    The target's own dropout is off. The adapter changes nothing at first, since its matrices B are
    zero; its matrices A are drawn from torch's generator.

    Args:
        spec: The target.
        settings: The section `train.backbone`.
        device: The device to compute on.
        dtype: The dtype of matrix products under the caller's autocast.
        workers: The training workers; with `settings.shard` the frozen layers are sharded over
            them.

    Raises:
        ConfigError: The target cannot be loaded, LoRA or sharding does not find its layers, the
            lm_head does not read the last hidden states, hidden states are not finite, or packed
            conversations attend to each other.
        EnvironmentFault: The target does not fit on the device, or a kernel or package is missing.
    """

    def __init__(
        self,
        spec: TargetSpec,
        settings: BackboneConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        workers: Workers = ALONE,
    ):
        super().__init__()
        sharded = settings.shard and workers.world_size > 1
        target = load_causal_lm(spec, "cpu" if sharded else device, too_large=SAVES_MEMORY)
        _keep_differentiable(target)
        self.tuned: Any = add_lora(
            target,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
        )
        if sharded:
            shard_layers(target, device, workers)
        with self.tuned.disable_adapter():
            verify_tap(target)
            verify_packing(target)
        layers = target.modules()
        for module in layers:
            if hasattr(module, "cast_input_dtype_enabled"):
                # Autocast casts once, to bf16; peft would first copy each layer's input to fp32.
                module.cast_input_dtype_enabled = dtype == torch.float32
        if settings.gradient_checkpointing:
            target.gradient_checkpointing_enable({"use_reentrant": False})
        self.eval()

    def states(self, batch: TextBatch) -> Tensor:
        """Compute the trained backbone's hidden states [N, D] at the learned positions."""
        found = self._target.base_model(
            input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False
        )
        return found.last_hidden_state.flatten(0, 1)[batch.learned_N]

    @torch.no_grad()
    def original_states(self, batch: TextBatch) -> Tensor:
        """Compute the original model's states [N, D] at the learned positions, without gradient."""
        with self.tuned.disable_adapter():
            return self.states(batch)

    def lora_inner(self, hidden_ND: Tensor) -> Tensor:
        """Apply the lm_head's lora_A to hidden states, with LoRA's dropout and scale; [N, R].

        Dropout is on in training mode only.
        """
        layer = self._lm_head
        inner = layer.lora_A[NAME]
        dropped_ND = layer.lora_dropout[NAME](hidden_ND.to(inner.weight.dtype))
        return inner(dropped_ND) * layer.scaling[NAME]

    @property
    def lora_outer(self) -> Tensor:
        """The weight [V, R] of the lm_head's lora_B."""
        return self._lm_head.lora_B[NAME].weight

    @property
    def head(self) -> TargetHead:
        """The target's frozen lm_head, without LoRA."""
        layer = self._lm_head.get_base_layer()
        return TargetHead(layer.weight, layer.bias)

    @torch.no_grad()
    def tuned_matrices(self) -> TargetWeights:
        """Return the lm_head with its LoRA merged, in fp32, and the frozen embedding.

        The backbone must be in evaluation mode, so that dropout is off.
        """
        weight_VD = self.head.weight_VD
        unit_DD = torch.eye(weight_VD.shape[1], device=weight_VD.device)
        lora_RD = self.lora_inner(unit_DD).float().T
        tuned_VD = weight_VD.float() + self.lora_outer.float() @ lora_RD
        embedding_VD = self._target.get_input_embeddings().weight.detach()
        return TargetWeights(lambda: tuned_VD, lambda: embedding_VD)

    @property
    def _target(self) -> Any:
        """The target model with its LoRA layers, without peft's wrapper."""
        return self.tuned.get_base_model()

    @property
    def _lm_head(self) -> Any:
        """The lm_head as a LoRA layer."""
        return self._target.get_output_embeddings()

    def train(self, mode: bool = True) -> Backbone:
        """Switch LoRA dropout and gradient checkpointing on or off, and return this module.

        All other layers stay in evaluation mode, except quantized layers, which stay in training
        mode.
        """
        super().train(False)
        _keep_differentiable(self)
        if mode:
            from transformers.modeling_layers import GradientCheckpointingLayer

            for module in self.modules():
                dropout = getattr(module, "lora_dropout", None)
                if isinstance(dropout, nn.Module):
                    dropout.train()
                if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                    module.training = True  # without the layers inside it, which may have dropout
        return self


def _keep_differentiable(module: nn.Module) -> None:
    """Set quantized layers to training mode, which bitsandbytes needs for backward on a CPU."""
    for layer in module.modules():
        if type(layer).__module__.startswith("bitsandbytes"):
            layer.training = True


def shard_layers(target: Any, device: torch.device, workers: Workers) -> None:
    """Shard each decoder layer's frozen weights over the training workers with FSDP2, in place.

    `target` is moved from the CPU to `device`. Each worker keeps a shard of every layer. It gathers
    a whole layer for the layer's forward and again for its backward, and frees it afterwards. LoRA
    weights, embeddings, the last norm and the lm_head are replicated. Every worker must run the
    layers equally often, even without text, because a gather waits for all workers.

    Raises:
        ConfigError: The target has no layers that can be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (workers.world_size,))
    trained = {parameter for parameter in target.parameters() if parameter.requires_grad}
    for layer in decoder_layers(target):
        fully_shard(layer, mesh=mesh, ignored_params=trained)
    whole = [parameter for parameter in target.parameters() if not isinstance(parameter, DTensor)]
    # This root has no sharded parameters; FSDP2 needs it to prefetch layers.
    fully_shard(target.base_model, mesh=mesh, ignored_params=set(whole))
    for tensor in (*whole, *target.buffers()):
        tensor.data = tensor.data.to(device)


@torch.no_grad()
def verify_packing(model: Any) -> None:
    """Raise ConfigError if conversations packed into a training sequence attend to each other."""
    device = input_device(model)
    lengths = (5, 8)
    rows = [torch.arange(length, device=device)[None] for length in lengths]
    alone = [model.base_model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
    ids_BT = torch.cat(rows, 1)  # each row counts from 0, so ids and positions are equal
    packed = model.base_model(
        input_ids=ids_BT, position_ids=ids_BT, use_cache=False
    ).last_hidden_state
    expected = torch.cat(alone, 1).float()
    difference = (packed.float() - expected).norm()
    if difference > 0.1 * expected.norm():  # other kernels in bf16 differ by some percent
        raise ConfigError(
            "In the target, conversations that are packed into one sequence see each other.",
            files.WHERE,
            HEADS_ALONE,
        )


def write_adapter(directory: Path, backbone: Backbone, spec: TargetSpec) -> None:
    """Write the LoRA adapter to a directory in peft's format, without peft's model card."""
    config = backbone.tuned.peft_config[NAME]
    config.base_model_name_or_path = spec.model
    config.revision = spec.revision
    config.target_modules = sorted(config.target_modules)  # a set has no fixed order
    # lm_head is adapted, so by default peft would add a copy of the embedding.
    backbone.tuned.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink()


def merge_backbone(target: TargetSpec, directory: str) -> None:
    """Merge Medusa-2's trained LoRA adapter into the target, and write the tuned backbone.

    In the train stage's directory, `adapter/` is read and `backbone/` is written.

    Raises:
        ConfigError, DataError: As `load_tuned` does.
        EnvironmentFault: The target cannot be loaded on this machine, or the disk is full.
    """
    adapter = Path(directory, "adapter")
    backbone = Path(directory, BACKBONE_DIRECTORY)
    made_of = {
        "base_model": None if is_local(target.model) else target.model,
        "revision": target.revision,
        "dtype": target.dtype,
        "adapter_sha256": FileFacts.of(adapter / "adapter_model.safetensors").sha256,
    }
    copied = []  # settings and code are copied unchanged
    settings = find_file(target.model, target.revision, GENERATION_FILE)
    if settings:
        copied.append(settings)
    if target.trust_remote_code and is_local(target.model):
        copied += sorted(Path(target.model).glob("*.py"))
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = target.chat_template or tokenizer.chat_template
    with disk_errors(backbone):
        model = load_tuned(target, adapter)
        write_backbone(backbone, model, tokenizer, as_they_are=copied, made_of=made_of)
