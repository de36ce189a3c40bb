"""The features engine on a fake CUDA device: the host waits for states alone, never to upload a
batch.
"""

from __future__ import annotations

from collections import Counter

import torch

from pipeline.targets.transformers_engines import TransformersFeatureEngine
from tests.fake_cuda.test_decoding import CONTEXT, D, target_on

LENGTHS = [5, CONTEXT, 1, 17, 33, 2, 2, 40, 8, 59]


def test_states_come_to_pinned_memory_while_the_next_batch_runs(on_fake_cuda):
    target, shapes = target_on("cuda"), []
    target.model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: shapes.append(inputs[0].shape)
    )
    engine = TransformersFeatureEngine(target, tokens_per_batch=80)
    on_fake_cuda.clear()
    states = dict(engine.stream([[3] * length for length in LENGTHS]))
    for index, length in enumerate(LENGTHS):
        assert states[index].shape == (length, D) and states[index].dtype == torch.bfloat16
        assert states[index].device.type == "cpu"
    assert all(length % 8 == 0 and rows * length <= 80 for rows, length in shapes)
    # transformers itself checks whether positions are packed, once a batch
    assert Counter(on_fake_cuda.waits) == {"event": len(shapes), "_local_scalar_dense": len(shapes)}
    assert not on_fake_cuda.uploads and not on_fake_cuda.downloads
