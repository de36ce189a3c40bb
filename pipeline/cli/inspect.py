"""`medusa-distill inspect`: a row as a person reads it."""

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
    directory = run.latest(stage)
    if directory is None:
        from pipeline.flow import STAGES

        if stage not in STAGES:
            raise ConfigError(
                f"There is no stage '{stage}'.", "inspect", f"The stages are {', '.join(STAGES)}."
            )
        raise ConfigError(
            f"This run has not reached {stage} yet.", str(run.path), "See `medusa-distill status`."
        )
    console = Console(highlight=False)
    shards = directory.shards()
    if not shards:
        if directory.done is None:
            what = (
                f"There is no summary of {stage}: it is not finished, or its DONE.json cannot be"
                " read."
            )
            raise DataError(what, str(directory.path), "The same `run` finishes or makes it anew.")
        console.print_json(data=directory.summary)
        return
    found = _find(shards, row)
    where = visible(f"  split {found.get('split')}  {directory.path.name}")
    console.print(Text.assemble((visible(found["id"]), "bold"), where))
    if "input_ids" not in found:
        for message in SeedRow.of(found).conversation.messages:
            console.print(
                Text.assemble((f"{message.role}:", "bold"), " ", visible(message.content))
            )
            if message.tool_calls:
                console.print(Text(visible(message.tool_calls), style="dim"))
        return
    console.print(coloured(TokenRow.of(found), _tokenizer(run, config)))
    if "positions" in found:
        footer = read_footer(shards[0])
        stored = "" if footer["precision"] == "native" else f" in {footer['precision']}"
        size = f"{footer['hidden_size']} × {footer['dtype']}{stored}"
        console.print(
            f"{len(found['positions'])} positions of {size}, {footer['tap']}", style="dim"
        )


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
    """The target's; the export's copy where the run was moved away from its target."""
    from pipeline.targets.spec import TargetSpec, load_tokenizer, resolve

    try:
        return load_tokenizer(resolve(config.target))
    except MedusaDistillError:
        if (export := run.latest("export")) is None or not export.done:
            raise
        return load_tokenizer(TargetSpec(str(export.path)))


def _find(shards: Sequence[Path], row: str | None) -> Row:
    wanted = row or "0"
    number = 0
    for path in shards:
        for candidate in read_rows(path):
            if candidate["id"] == wanted or (wanted.isdecimal() and number == int(wanted)):
                return candidate
            number += 1
    where = str(shards[0].parent.parent)
    raise ConfigError(
        f"There is no row '{wanted}' among the {number} rows.",
        where,
        "Give an id or a number from 0.",
    )
