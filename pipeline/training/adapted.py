"""The target with LoRA on it, and itself without: what Medusa-2 trains, and what it is not to drift from.

The original is the same weights with the adapter off. The lm_head never runs as a layer: what reads the states holds
its logits in chunks (`pipeline.training.backbone_losses`).

Letters: B sequences, T tokens, N learned positions, D hidden size, V vocabulary, R rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.config import BackboneConfig
from pipeline.errors import ConfigError
from pipeline.storage.atomic import atomic_path, write_text
from pipeline.targets import files
from pipeline.targets.loading import input_device, load_causal_lm, verify_tap
from pipeline.targets.lora import HEADS_ALONE, add_lora
from pipeline.targets.spec import TargetSpec
from pipeline.training.backbone_losses import TunedHead
from pipeline.training.sharding import shard_layers
from pipeline.training.texts import TextBatch
from pipeline.training.world import World

NAME = "default"  # peft's, of an adapter
LESS_ON_EACH = "Set train.backbone.shard: true with several workers, or train.backbone.quantization: 4bit."


class Backbone(nn.Module):
    """A target whose adapter trains; its own dropouts, if it has any, stay off.

    Args:
        spec: The target; its adapter starts as the identity, drawn from torch's generator.
        settings: LoRA's rank, alpha and dropout, and whether to recompute activations.
        device: Where it goes.
        dtype: In what matrix products run; where it is another than fp32, under autocast.
        world: The workers; `train.backbone.shard` splits the frozen layers over them, where they are several.

    Raises:
        ConfigError: LoRA does not find its layers, its lm_head reads something else than its last states, or packed
            conversations see each other in it.
        EnvironmentFault: It does not fit.
    """

    def __init__(
        self,
        spec: TargetSpec,
        settings: BackboneConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        world: World | None = None,
    ):
        super().__init__()
        world = world or World()
        sharded = settings.shard and world.size > 1
        target = load_causal_lm(spec, "cpu" if sharded else device, too_large=LESS_ON_EACH)
        _keep_differentiable(target)
        self.tuned = add_lora(target, rank=settings.lora_rank, alpha=settings.lora_alpha, dropout=settings.lora_dropout)
        if sharded:
            shard_layers(target, device, world)
        with cast(Any, self.tuned).disable_adapter():
            verify_tap(target)
            verify_packing(target)
        for module in cast(Any, self.tuned).modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                # Autocast casts once, to bf16; peft would first make an fp32 copy of what each layer reads.
                module.cast_input_dtype_enabled = dtype == torch.float32
        if settings.gradient_checkpointing:
            target.gradient_checkpointing_enable({"use_reentrant": False})
        self.eval()

    def states(self, batch: TextBatch) -> Tensor:
        """The tuned states [N, D] at the learned positions, differentiable."""
        found = self._target.base_model(input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False)
        return found.last_hidden_state.flatten(0, 1)[batch.learned_N]

    @torch.no_grad()
    def original_states(self, batch: TextBatch) -> Tensor:
        """The original's states [N, D] at the same positions."""
        with cast(Any, self.tuned).disable_adapter():
            return self.states(batch)

    def low(self, hidden_ND: Tensor) -> Tensor:
        """What the inner half of lm_head's LoRA makes of the states, dropout and scale included: [N, R]."""
        layer = self._lm_head
        inner = layer.lora_A[NAME]
        return inner(layer.lora_dropout[NAME](hidden_ND.to(inner.weight.dtype))) * layer.scaling[NAME]

    @property
    def head(self) -> TunedHead:
        """What turns states and `low` into the tuned logits."""
        own = self._lm_head.get_base_layer()
        return TunedHead(own.weight, own.bias, self._lm_head.lora_B[NAME].weight)

    @property
    def _target(self) -> Any:
        return cast(Any, self.tuned).get_base_model()

    @property
    def _lm_head(self) -> Any:
        return self._target.get_output_embeddings()

    def train(self, mode: bool = True) -> Backbone:
        """Turn LoRA's dropout on or off, and with it, where it is asked for, recomputation; nothing else."""
        super().train(False)
        _keep_differentiable(self)
        if mode:
            from transformers.modeling_layers import GradientCheckpointingLayer

            for module in self.modules():
                if isinstance(dropout := getattr(module, "lora_dropout", None), nn.Module):
                    dropout.train()
                if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                    module.training = True  # it alone: the layers inside it may have dropout
        return self


def _keep_differentiable(module: nn.Module) -> None:
    """Tell 4-bit layers that they train: else bitsandbytes, on a CPU, takes a kernel that has no backward."""
    for layer in module.modules():
        if type(layer).__module__.startswith("bitsandbytes"):
            layer.training = True


@torch.no_grad()
def verify_packing(model: Any) -> None:
    """Check that conversations packed into one sequence do not see each other in this model.

    Raises:
        ConfigError: They do.
    """
    device = input_device(model)
    lengths = (5, 8)
    rows = [torch.arange(length, device=device)[None] for length in lengths]
    alone = [model.base_model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
    ids_BT = torch.cat(rows, 1)
    packed = model.base_model(input_ids=ids_BT, position_ids=ids_BT, use_cache=False).last_hidden_state
    expected = torch.cat(alone, 1).float()
    if (packed.float() - expected).norm() > 0.1 * expected.norm():  # other kernels in bf16 differ by some percent
        what = "In the target, conversations that are packed into one sequence see each other."
        raise ConfigError(what, files.WHERE, HEADS_ALONE)


def write_adapter(directory: Path, backbone: Backbone, spec: TargetSpec) -> None:
    """Write the adapter as peft reads it: adapter_model.safetensors, then adapter_config.json.

    peft's own writer would add a copy of the embeddings where lm_head is adapted, and list layers in no fixed order.
    """
    from peft import get_peft_model_state_dict

    directory.mkdir(exist_ok=True)
    tensors = get_peft_model_state_dict(backbone.tuned, save_embedding_layers=False)
    with atomic_path(directory / "adapter_model.safetensors") as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
    settings = backbone.tuned.peft_config[NAME].to_dict()
    settings |= {"base_model_name_or_path": spec.model, "revision": spec.revision, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    write_text(directory / "adapter_config.json", json.dumps(plain, indent=2, sort_keys=True) + "\n")
