"""Read the feature cache with pyarrow and numpy alone: nothing of this project, and no torch.

    python examples/read_cache.py runs/demo

Prints, for each shard, its rows and the states of its first row. bfloat16, which numpy does not have, is widened to
float32: its bits are the upper half of a float32's.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def states(hidden: bytes, dtype: str, hidden_size: int) -> np.ndarray:
    """The stored bytes as float32 [positions, hidden_size]."""
    if dtype == "bfloat16":
        values = (np.frombuffer(hidden, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(hidden, dtype).astype(np.float32)
    return values.reshape(-1, hidden_size)


def main(run: str) -> None:
    for path in sorted(Path(run, "latest", "features", "shards").glob("*.parquet")):
        shard = pq.ParquetFile(path, page_checksum_verification=True)
        facts = {key.decode(): value.decode() for key, value in shard.schema_arrow.metadata.items()}
        row = shard.read_row_group(0).slice(0, 1).to_pylist()[0]
        found = states(row["hidden"], facts["dtype"], int(facts["hidden_size"]))
        written = sum(span["end"] - span["start"] for span in row["spans"])
        print(f"{path.name}: {shard.metadata.num_rows} rows, states in {facts['dtype']}")
        print(f"  {row['id']} ({row['split']}): {len(row['input_ids'])} tokens, {written} written by the target")
        print(f"  states {found.shape}, norm of the first {np.linalg.norm(found[0]):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
