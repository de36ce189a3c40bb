"""How large a run will be: from what it has already, else from the configuration's bounds."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.errors import MedusaDistillError
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.spec import model_config, resolve

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
ASSUMED_HIDDEN_SIZE = 4096  # a 7B model's; said only while the target cannot be looked up


@dataclass(frozen=True)
class Estimate:
    """Upper bounds: every answer as long as it may be, until generate has run and the true counts are known."""

    conversations: str
    tokens: int  # to write, and to cache a state of each
    bytes_per_position: int

    @property
    def disk_bytes(self) -> int:
        return self.tokens * self.bytes_per_position


def estimate(run: RunDirectory, config: Config) -> Estimate:
    """Tokens to write and to cache, and the bytes of each."""
    seeds, generated = run.latest("seeds"), run.latest("generate")
    rows = int((seeds.summary if seeds else {}).get("rows", 0))
    limits = [source.limit for source in config.seeds.sources]
    known_limit = sum(limit for limit in limits if limit) if all(limits) else 0
    bound = (rows or known_limit) * config.generate.rounds * config.generate.max_new_tokens
    written = int((generated.summary if generated else {}).get("tokens", 0))
    try:
        spec = resolve(config.target)
        hidden_size, width = model_config(spec).hidden_size, BYTES_OF[spec.dtype]
    except MedusaDistillError:
        hidden_size, width = ASSUMED_HIDDEN_SIZE, 2
    conversations = f"{rows:,}" if rows else f"at most {known_limit:,}" if known_limit else "an unknown number of"
    return Estimate(conversations, written or bound, hidden_size * width)
