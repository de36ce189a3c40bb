"""The base class of configuration sections, and the sections `run`, `placement` and `limits`."""

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
Precision = Literal["native", "fp8"]  # of stored states
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")


class Section(BaseModel):
    """Base class of configuration sections: frozen, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def nothing_is_the_defaults(cls, value: Any) -> Any:
        """Replace None, the value of an empty section in YAML, by an empty mapping of settings."""
        return {} if value is None else value


class RunConfig(Section):
    """Settings of `run`: name, directories and seed of a run."""

    name: str = Field(
        description="Name of the run; its directory is root/name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    root: Path = Field(
        Path("~/medusa-runs"),
        description="Directory of all runs, on storage that every worker sees.",
    )
    store: Path | None = Field(
        None,
        description=(
            "Directory for the stage directories. Runs with the same store share them. Default:"
            " the run directory."
        ),
    )
    seed: int = Field(0, description="Seed of sampling, splits and training.", ge=0)

    @field_validator("root", "store")
    @classmethod
    def home(cls, value: Path | None) -> Path | None:
        """Expand `~` in the settings `run.root` and `run.store`."""
        return value and value.expanduser()

    @property
    def directory(self) -> Path:
        """The run directory, `run.root`/`run.name`."""
        return self.root / self.name


class PlacementOf(Section):
    """Settings of one stage's workers: their number, and the CPU cores and GPUs of each."""

    workers: PositiveInt | Literal["auto"] = Field(
        1,
        description=(
            "Number of worker processes. auto: as many as fit; without GPUs, one per node."
        ),
    )
    gpus_per_worker: int | None = Field(
        None, description="GPUs per worker. Default: 1 if the cluster has GPUs, else 0.", ge=0
    )
    cpus_per_worker: PositiveInt | None = Field(
        None, description="CPU cores per worker. Default: an equal share."
    )


class PlacementConfig(Section):
    """Settings of `placement`: the workers of generate, features and train."""

    generate: PlacementOf = Field(default_factory=PlacementOf, description="Workers of generate.")
    features: PlacementOf = Field(default_factory=PlacementOf, description="Workers of features.")
    train: PlacementOf = Field(default_factory=PlacementOf, description="Workers of train.")
    gpu_memory_gb: float | None = Field(
        None,
        description=(
            "Nominal memory of each GPU in GB (80 for an H100, at least 1), to plan for GPUs that"
            " this machine does not have. Default: the memory of this machine's GPUs."
        ),
        ge=1,
    )
    gpu_tflops: PositiveFloat | None = Field(
        None,
        description=(
            "Peak TFLOP/s of each GPU in the target's dtype, without sparsity (989.5 for an"
            " H100), to estimate times. For GPUs that this machine does not have, set"
            " `gpu_memory_gb` too. Default: the figure of the data sheet, for common GPUs."
        ),
    )
    gpu_bandwidth_gbs: PositiveFloat | None = Field(
        None,
        description=(
            "Peak memory bandwidth of each GPU in GB/s (3350 for an H100); set it together with"
            " `gpu_tflops`."
        ),
    )

    @model_validator(mode="after")
    def has_both_peaks(self) -> PlacementConfig:
        """Refuse one of `placement.gpu_tflops` and `placement.gpu_bandwidth_gbs` alone."""
        if (self.gpu_tflops is None) != (self.gpu_bandwidth_gbs is None):
            raise ValueError("give gpu_tflops and gpu_bandwidth_gbs together, or neither")
        return self

    def of_stages(self) -> dict[str, PlacementOf]:
        """Return the placement settings of generate, features and train, by stage."""
        return {"generate": self.generate, "features": self.features, "train": self.train}


class LimitsConfig(Section):
    """Settings of `limits`: quarantined rows and free disk space."""

    max_quarantine_fraction: float = Field(
        0.2,
        description=(
            "A stage stops (exit 3) if a larger fraction of its rows is quarantined. Duplicates and"
            " contaminated rows do not count."
        ),
        ge=0,
        le=1,
    )
    min_free_disk_gb: float = Field(
        1.0, description="A stage stops (exit 4) if less disk space is free, in GB.", ge=0
    )
