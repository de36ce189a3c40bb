"""Whether the stages that a run links to are those that its export was made from."""

from __future__ import annotations

from pipeline.errors import DataError
from pipeline.export.card_facts import CACHES
from pipeline.storage.run_directory import RunDirectory


def require_one_history(run: RunDirectory) -> None:
    """Every stage but push is finished and was made from the stages that the run links to; a cache may be deleted.

    After `run --until train` with another setting they are not, and a card would mix the figures of two trainings.

    Raises:
        DataError: Names the stage that is unfinished, missing, or another one.
    """
    fix = "Run the same configuration again, and then push."
    stages = run.stages()
    stages.pop("push", None)
    for name, stage in stages.items():
        if stage.done is None:
            raise DataError(f"The stage {name} is not finished.", str(stage.path), fix)
        for source, content in stage.done.upstream.items():
            link = str(run.path / "latest" / source)
            if source in stages:
                if stages[source].content != content:
                    raise DataError(f"The stage {source} is not the one that {name} was made from.", link, fix)
            elif source not in CACHES:
                raise DataError(f"The stage {source} is missing.", link, fix)
