"""`medusa-distill run`: run all stages, or up to one."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from pipeline.cli.arguments import ConfigArgument, Overrides
from pipeline.config.load import load_config


def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    until: Annotated[str | None, Option(help="Stop after this stage.")] = None,
    executor: Annotated[str, Option(help="ray, or inline: everything in this process.")] = "ray",
    fresh: Annotated[
        str | None, Option(help="Discard this stage's result and run it again.")
    ] = None,
) -> None:
    """Run the stages of a configuration, or those up to --until.

    The stages are seeds, generate, features, train, calibrate, export, check and, with
    push.repo_id, push. Running it again continues: finished stages and committed shards are kept. A
    changed setting runs its stage and the later ones again.

    Example: medusa-distill run configs/qwen2.5-7b.yaml seeds.sources=prompts.jsonl
        train.num_heads=4 --until train
    """
    settings = load_config(config, overrides or ())
    from pipeline.flow import run_flow  # torch and transformers: a wrong key does not wait for them

    run_flow(settings, until=until, executor=executor, fresh=fresh)
