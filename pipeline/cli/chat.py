"""`medusa-distill chat`: chat with an export's target and heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Context, Option

from pipeline.cli.arguments import Gpus, TargetSettings
from pipeline.config.load import target_settings
from pipeline.storage.run_directory import export_of


def chat(
    context: Context,
    source: Annotated[Path, Argument(help="A run's directory, or an export.")],
    settings: TargetSettings = None,
    plain: Annotated[
        bool, Option("--plain", help="Decode without the heads, for comparison.")
    ] = False,
    max_new_tokens: Annotated[int, Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[
        float, Option(min=0.0, help="0 is greedy; above 0 the model's distribution is kept.")
    ] = 0.0,
    seed: Annotated[
        int, Option(help="Sampling seed; the text is the same with and without the heads.")
    ] = 0,
    system: Annotated[str | None, Option(help="A system message.")] = None,
    base_model: Annotated[
        str | None,
        Option(
            help="The target as a directory or a Hub id. Default: the target named in the export."
        ),
    ] = None,
    gpus: Gpus = None,
) -> None:
    """Chat with an export's target and heads; accepted guesses are green.

    Each answer is followed by its tokens per step. Ctrl-C ends an answer, Ctrl-D the chat. If
    standard input is a pipe, each line is a question. If standard output is not a terminal, it gets
    the answers as plain text, and their speed goes to stderr.

    Example: medusa-distill chat runs/demo, and again with --plain.
    Example: medusa-distill chat EXPORT target.template_arguments.enable_thinking=false
    """
    given = target_settings(settings or (), context.params)
    from pipeline.api.models import load_export, load_target  # a wrong setting does not wait
    from pipeline.cli.chat_session import ChatSession, Sampling
    from pipeline.decoding.acceptance import acceptance_rule
    from pipeline.export.layout import target_of

    if plain:
        target = load_target(base_model or target_of(export_of(source)), gpus=gpus, **given)
        decoder = target.decoder()
    else:
        export = load_export(source, target=base_model, gpus=gpus, **given)
        target, decoder = export.target, export.decoder
    console = Console(highlight=False, soft_wrap=True)
    notes = Console(highlight=False, soft_wrap=True, stderr=not console.is_terminal)
    sampling = Sampling(max_new_tokens, acceptance_rule("rejection", temperature), seed)
    session = ChatSession(target, decoder, sampling, system, console, notes)
    if sys.stdin.isatty():
        session.answer_person()
    else:
        session.answer_lines(sys.stdin)
