"""Read the feature cache with pyarrow and numpy only, without this project and without torch.

    python examples/read_cache.py runs/demo

Prints, for each shard, the number of rows, and the shape and a norm of the first row's states.
numpy has no bfloat16; such numbers are the upper 16 bits of a float32, and are widened to it. With
`features.precision` fp8, numbers have 8 bits and each state has a scale.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def states(row: dict, facts: dict[str, str]) -> np.ndarray:
    """Return a row's hidden states as float32 [positions, hidden_size].

    `facts` is the metadata of the shard's schema.
    """
    if facts["precision"] == "native":
        return numbers(row["hidden"], facts["dtype"]).reshape(-1, int(facts["hidden_size"]))
    stored = numbers(row["hidden"], facts["precision"]).reshape(-1, int(facts["hidden_size"]))
    return stored * np.array(row["scales"], np.float32)[:, None]


def numbers(stored: bytes, dtype: str) -> np.ndarray:
    """Convert stored numbers to float32.

    `dtype` is bfloat16, fp8 or the name of a numpy dtype.
    """
    if dtype == "bfloat16":
        return (np.frombuffer(stored, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8":  # e4m3: a sign, four bits of exponent, three of mantissa
        bits = np.frombuffer(stored, np.uint8)
        exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7) / 8
        size = np.where(exponent, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6))
        return np.where(bits & 128, -size, size).astype(np.float32)
    return np.frombuffer(stored, dtype).astype(np.float32)


def main(run: str) -> None:
    for path in sorted(Path(run, "latest", "features", "shards").glob("*.parquet")):
        shard = pq.ParquetFile(path, page_checksum_verification=True)
        facts = {key.decode(): value.decode() for key, value in shard.schema_arrow.metadata.items()}
        row = shard.read_row_group(0).slice(0, 1).to_pylist()[0]
        found = states(row, facts)
        written = sum(span["end"] - span["start"] for span in row["spans"])
        print(f"{path.name}: {shard.metadata.num_rows} rows, states in {facts['dtype']}")
        print(
            f"  {row['id']} ({row['split']}): {len(row['input_ids'])} tokens, {written} written by"
            " the target"
        )
        print(f"  states {found.shape}, norm of the first {np.linalg.norm(found[0]):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
