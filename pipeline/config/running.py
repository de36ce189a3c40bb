"""The base class of settings; settings of the run, its placement and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

PlainData = dict[str, Any]  # a mapping of YAML
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Precision = Literal["native", "fp8", "int8"]  # of stored states
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")


class Section(BaseModel):
    """Base class of every section of settings: frozen, and strict about unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def nothing_is_the_defaults(cls, value: Any) -> Any:
        """Read a section of settings that is empty (None in YAML) as one without keys."""
        return {} if value is None else value


class RunConfig(Section):
    """Settings of `run`: name, directories and seed of a run."""

    name: str = Field(
        description="Name of the run; its directory is root/name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    root: Path = Field(
        Path("~/medusa-runs"),
        description="Directory of all runs; on storage that every worker sees.",
    )
    store: Path | None = Field(
        None,
        description=(
            "Where stage directories live; runs that name one store share them. Default: the run"
            " directory."
        ),
    )
    seed: int = Field(0, description="Seed of sampling, splits and training.", ge=0)

    @field_validator("root", "store")
    @classmethod
    def home(cls, value: Path | None) -> Path | None:
        """Expand `~` in a setting that is a directory."""
        return value and value.expanduser()

    @property
    def directory(self) -> Path:
        """The run directory that the settings `run.root` and `run.name` give."""
        return self.root / self.name


class PlacementOf(Section):
    """Settings of one stage's workers: their number, and the CPU cores and GPUs of each."""

    workers: PositiveInt | Literal["auto"] = Field(
        1,
        description=(
            "Worker processes; auto: as many as there is room for, one per GPU or, without GPUs,"
            " per node."
        ),
    )
    gpus_per_worker: int | None = Field(
        None, description="GPUs of each; default 1 where the cluster has GPUs, else 0.", ge=0
    )
    cpus_per_worker: PositiveInt | None = Field(
        None, description="CPU cores of each; default: an equal share."
    )


class PlacementConfig(Section):
    """Settings of `placement`: the workers of generate, features and train."""

    generate: PlacementOf = Field(default_factory=PlacementOf, description="Workers of generate.")
    features: PlacementOf = Field(default_factory=PlacementOf, description="Workers of features.")
    train: PlacementOf = Field(default_factory=PlacementOf, description="Workers of train.")
    gpu_memory_gb: PositiveFloat | None = Field(
        None,
        description=(
            "Memory of each GPU, as its name has it (80 of an H100), to plan for GPUs that this"
            " machine has not. Default: what the GPUs here have."
        ),
    )

    def of_stages(self) -> dict[str, PlacementOf]:
        """Return the placement settings of generate, features and train, by stage."""
        return {"generate": self.generate, "features": self.features, "train": self.train}


class LimitsConfig(Section):
    """Settings of `limits`: quarantined rows, free disk space, failures, and time per shard."""

    max_quarantine_fraction: float = Field(
        0.2,
        description="A stage stops (exit 3) when it refuses more; duplicates do not count.",
        ge=0,
        le=1,
    )
    min_free_disk_gb: float = Field(
        1.0, description="A stage stops (exit 4) before the disk has less.", ge=0
    )
    max_consecutive_failures: PositiveInt = Field(
        3,
        description=(
            "A stage stops when a shard fails this often; one that ends its worker's process this"
            " often is searched for the rows that do it, which are quarantined."
        ),
    )
    max_hours_per_shard: float = Field(
        6.0,
        description=(
            "A worker that takes longer for one shard is ended, and the shard given to another."
        ),
        gt=0,
    )
