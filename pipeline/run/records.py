"""Whether the stages that a run links to are those that its export was made from."""

from __future__ import annotations

from pipeline.errors import DataError
from pipeline.export.card import CACHES
from pipeline.storage.run_directory import RunDirectory


def require_one_history(run: RunDirectory) -> None:
    """Refuse stages that were not made from one another: a card would mix two trainings' figures.

    They are not after `run --until train` with another setting. A cache may be deleted.

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
                    what = f"The stage {source} is not the one that {name} was made from."
                    raise DataError(what, link, fix)
            elif source not in CACHES:
                raise DataError(f"The stage {source} is missing.", link, fix)
