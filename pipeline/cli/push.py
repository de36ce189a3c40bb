"""`medusa-distill push`: publish finished heads."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from pipeline.cli.arguments import RunArgument


def push(
    run_dir: RunArgument,
    repo_id: Annotated[
        str | None,
        Option(help="USER/NAME on the Hub, or USER/. Default: push.repo_id of the run."),
    ] = None,
    base_model: Annotated[
        str | None,
        Option(help="The target's Hub id, needed for Medusa-1 if the run's target is local."),
    ] = None,
    license: Annotated[
        str | None,
        Option(help="The licence that the cards declare. Default: the target's own."),
    ] = None,
    private: Annotated[bool, Option(help="Make the repositories private.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what would be pushed, without network.")
    ] = False,
) -> None:
    """Push RUN_DIR's export and model card to the Hub, as one commit. Requires a passed check.

    USER/ alone names the repository after the target. With Medusa-2 the tuned backbone is pushed
    first, to USER/NAME, and its heads then to USER/NAME-speculator.medusa, or .eagle for recurrent
    heads.
    """
    from pipeline.flow import push_run  # torch and transformers: --help does not wait for them

    push_run(
        run_dir,
        dry_run=dry_run,
        repo_id=repo_id,
        base_model=base_model,
        license=license,
        private=private,
    )
