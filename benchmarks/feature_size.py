"""Benchmark of the feature cache's bytes per position over the raw size of a state.

Claim: at most 1.02 times 4·D bytes in fp32 and 2·D bytes in bf16, for a hidden size of D.

Measured: the size of a shard of the features stage (ids, spans, positions, checksums and receipt
included) per position, against the raw size of a state. A random backbone's states are
representative: mantissas are random and only exponents compress. Without a codec, the default,
states are not compressed, which is the upper bound for any target; zstd is reported without an aim.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks import rows, targets
from benchmarks.claims import Claim, Result
from pipeline.config import FeaturesConfig
from pipeline.stages.features import Worker
from pipeline.storage.shards import Codec

AIM = 1.02
HIDDEN_SIZES = (256, 4096)  # the demo's, and a 7B model's
DTYPES = ("float32", "bfloat16")
CODECS: tuple[Codec, ...] = ("zstd", "none")


def measure(*, tiny: bool = False) -> Result:
    """Measure the bytes per position for every hidden size, dtype and codec."""
    num_rows = 2 if tiny else 32
    claims = []
    for hidden_size in (64,) if tiny else HIDDEN_SIZES:
        shape = targets.TINY | {
            "hidden_size": hidden_size,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
        }
        made = rows.ragged_rows(num_rows, 64, 512, shape["vocab_size"])
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as temporary:
                target = targets.random_target(Path(temporary) / "target", shape, dtype)
                claims += [
                    _claim(Path(temporary) / codec, target, hidden_size, made, codec)
                    for codec in CODECS
                ]
    return Result(claims, {"rows": num_rows, "written_share": rows.WRITTEN_SHARE})


def _claim(
    directory: Path,
    target: targets.TargetSpec,
    hidden_size: int,
    made: list[rows.Row],
    codec: Codec,
) -> Claim:
    (task,) = rows.features_tasks(directory, [made])
    receipt = Worker(target, FeaturesConfig(tokens_per_batch=4096, codec=codec), gpus=0)(task)
    state = hidden_size * getattr(torch, target.dtype).itemsize
    position = task.shard.stat().st_size / receipt.stats["positions"]
    name = (
        f"bytes per position over the state's own, D = {hidden_size:,}, {target.dtype}, codec"
        f" {codec}"
    )
    aim = AIM if codec == FeaturesConfig().codec else None
    return Claim(
        name, position / state, aim=aim, at_most=True, sides={"bytes": position, "state": state}
    )
