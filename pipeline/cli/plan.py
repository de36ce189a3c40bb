"""`medusa-distill plan`: print what a run would do and cost."""

from __future__ import annotations

from pipeline.cli.arguments import ConfigArgument, Overrides
from pipeline.config.load import load_config


def plan(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Print which stages would run and which are cached, with memory, disk space and hours.

    Fails with exit code 2, 3 or 4 where `run` would. Starts and writes nothing. Of a target on the
    Hub, only the configuration and the tokenizer are fetched.
    """
    settings = load_config(config, overrides or ())
    from pipeline.cli.plan_output import print_plan  # imports torch: a wrong key does not wait
    from pipeline.flow import wanted_stages
    from pipeline.run.resolved import resolve_run

    print_plan(resolve_run(settings, wanted_stages(settings)))
