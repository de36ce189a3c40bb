"""`medusa-distill inspect`: print one row in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.seed_rows import SeedRow
from pipeline.config import Config
from pipeline.errors import ConfigError, DataError, MedusaDistillError
from pipeline.formatting import visible
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import Row, read_footer, read_rows

COLOURS = {"assistant": "green", "user": "cyan"}


def inspect(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    stage: Annotated[
        str, typer.Argument(help="seeds, generate or features; of the others the summary is shown.")
    ],
    row: Annotated[
        str | None,
        typer.Argument(help="A row's id, or its number counted from 0. Default: the first."),
    ] = None,
) -> None:
    """Show a row with what the target wrote in colour (assistant green, user cyan)."""
    run, config = RunDirectory.open(run_dir)
    directory, console = run.latest(stage), Console(highlight=False)
    if directory is None:
        from pipeline.flow import STAGES  # imports torch, and --help does not wait for it

        if stage in STAGES:
            what, fix = f"This run has not reached {stage} yet.", "See `medusa-distill status`."
        else:
            what, fix = f"There is no stage '{stage}'.", f"The stages are {', '.join(STAGES)}."
        raise ConfigError(what, str(run.path), fix)
    shards = directory.shards()
    if shards:
        _print_row(console, _find(shards, row), shards[0], run, config)
    elif directory.done:
        console.print_json(data=directory.summary)
    else:
        what = f"{stage} is not finished, or its DONE.json cannot be read."
        raise DataError(what, str(directory.path), "The same `run` finishes or makes it anew.")


def _print_row(console: Console, row: Row, shard: Path, run: RunDirectory, config: Config) -> None:
    about = visible(f"  split {row.get('split')}  {shard.parent.parent.name}")
    console.print(Text.assemble((visible(row["id"]), "bold"), about))
    if "input_ids" not in row:
        for message in SeedRow.of(row).conversation.messages:
            role = (f"{message.role}:", "bold")
            console.print(Text.assemble(role, " ", visible(message.content)))
            if message.tool_calls:
                console.print(Text(visible(message.tool_calls), style="dim"))
        return
    console.print(coloured(TokenRow.of(row), _tokenizer(run, config)))
    if "positions" in row:
        footer = read_footer(shard)
        size = f"{footer['hidden_size']} × {footer['dtype']}"
        if footer["precision"] != "native":
            size += f" in {footer['precision']}"
        words = f"{len(row['positions'])} positions of {size}, {footer['tap']}"
        console.print(words, style="dim")


def coloured(row: TokenRow, tokenizer: Any) -> Text:
    """A row's tokens as text, each target-written span in its role's colour."""
    ids, text, at = row.input_ids.tolist(), Text(), 0
    for span in row.spans:
        text.append(visible(tokenizer.decode(ids[at : span.start])), style="dim")
        text.append(
            visible(tokenizer.decode(ids[span.start : span.end])), style=COLOURS.get(span.role, "")
        )
        at = span.end
    text.append(visible(tokenizer.decode(ids[at:])), style="dim")
    return text


def _tokenizer(run: RunDirectory, config: Config) -> Any:
    """The target's tokenizer; the export's copy where the target is gone."""
    from pipeline.targets.spec import TargetSpec, load_tokenizer, resolve

    try:
        return load_tokenizer(resolve(config.target))
    except MedusaDistillError:
        export = run.latest("export")
        if export is None or not export.done:
            raise
        return load_tokenizer(TargetSpec(str(export.path)))


def _find(shards: Sequence[Path], wanted: str | None) -> Row:
    """The row of an id or a number; by default the first."""
    number = 0
    for path in shards:
        for row in read_rows(path):
            if wanted in (None, row["id"], str(number)):
                return row
            number += 1
    what = f"There is no row '{wanted}' among the {number} rows."
    raise ConfigError(what, str(shards[0].parent.parent), "Give an id or a number from 0.")
