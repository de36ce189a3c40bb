"""Whether the stages of a run are the ones that its check has read, by their records."""

from __future__ import annotations

from pipeline.errors import DataError
from pipeline.export.card_facts import CACHES
from pipeline.storage.description import Description
from pipeline.storage.run_directory import RunDirectory


def require_records(run: RunDirectory) -> None:
    """Every stage from which the check's figures come is finished, has whole records, and is what the next one read.

    A feature cache whose directory was deleted to make room is not missed.

    Raises:
        DataError: Of one of them this cannot be said.
    """
    stages = run.stages()
    left: list[tuple[str, str | None]] = [("check", None)]  # a stage, and what the next one read of it
    seen = set()
    while left:
        name, read = left.pop()
        stage, link = stages.get(name), run.path / "latest" / name
        if stage is None and name in CACHES and link.is_symlink() and not link.exists():
            continue
        done = stage.done if stage else None
        described = Description.read(stage.path) if stage else None
        if not stage or not done or not described or done.fingerprint != described.fingerprint:
            what = f"Of the stage {name} there is no whole record, and the figures of this run come from it."
            raise DataError(what, str(link), "Run the same configuration again: what is damaged is made anew.")
        if read not in (None, stage.content):
            what = f"The stage {name} is not the one from which these heads were made."
            raise DataError(what, str(link), "Run the same configuration again, and then push.")
        if name not in seen:
            seen.add(name)
            left += done.upstream.items()
