"""The frozen layers of a target, each split over all workers (FSDP2), for one that no single GPU holds.

A worker keeps its part of every decoder layer and gathers a layer whole where it is run, forward, again in backward,
and frees it. What trains is left out: LoRA stays whole on every worker, and with it gradients, optimizer, checkpoints.
So do embeddings, the last norm and lm_head, which is read in chunks rather than run, and may be the embedding too.

Every worker has to run the same layers equally often, the last one that has no text left as well: a gather waits for
all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.targets.lora import decoder_layers
from pipeline.training.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_layers(target: PreTrainedModel, device: torch.device, world: World) -> None:
    """Split the frozen weights of each layer over the workers, in place, and bring `target`, from the CPU, to `device`.

    One layer at a time is whole on the device; later, as the next is gathered while one runs, two are. Parameters that
    train are not split.

    Raises:
        ConfigError: The target has no layers of the kind that can be split.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # a second, which only this costs
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (world.size,))
    trained = {parameter for parameter in target.parameters() if parameter.requires_grad}
    for layer in decoder_layers(target):
        fully_shard(layer, mesh=mesh, ignored_params=trained)
    whole = [parameter for parameter in target.parameters() if not isinstance(parameter, DTensor)]
    # Of no parameters; it has the layers know each other, so that one is gathered while another runs.
    fully_shard(cast(Any, target).base_model, mesh=mesh, ignored_params=set(whole))
    for tensor in (*whole, *target.buffers()):
        tensor.data = tensor.data.to(device)
