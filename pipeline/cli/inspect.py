"""`medusa-distill inspect`: print one row in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.seed_rows import SeedRow
from pipeline.cli.arguments import RunArgument
from pipeline.config import Config
from pipeline.errors import ConfigError, DataError
from pipeline.formatting import visible
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import Row, read_rows

COLOURS = {"assistant": "green", "user": "cyan"}


def inspect(
    run_dir: RunArgument,
    stage: Annotated[
        str,
        Argument(
            help="seeds, generate, features or row-features; for others, the summary is printed."
        ),
    ],
    row: Annotated[
        str | None,
        Argument(help="A row's id, or its number counted from 0. Default: the first."),
    ] = None,
) -> None:
    """Print one row of a stage; text that the target wrote has the colour of its role.

    The assistant's text is green, the user's is cyan. For a stage without rows, print its summary.
    """
    run, config = RunDirectory.open(run_dir)
    directory, console = run.latest(stage), Console(highlight=False)
    if directory is None:
        raise ConfigError(
            f"This run has no stage '{stage}' yet.",
            run.path,
            "`medusa-distill status` lists the stages and their states.",
        )
    shards = directory.shards()
    if shards:
        _print_row(console, _find_row(shards, row), run, config)
    elif directory.done:
        console.print_json(data=directory.summary)
    else:
        raise DataError(
            f"{stage} is not finished, or its DONE.json cannot be read.",
            directory.path,
            "Run the same configuration again to finish or rebuild the stage.",
        )


def _print_row(console: Console, row: Row, run: RunDirectory, config: Config) -> None:
    """Print a row for `inspect`: the messages of a seed, or the text of any other row's tokens."""
    console.print(Text(visible(f"{row['id']}  split {row['split']}"), "bold"))
    if "input_ids" in row:
        console.print(coloured_text(TokenRow.of(row), _tokenizer(run, config)))
        if "positions" in row:
            console.print(f"{len(row['positions'])} states", style="dim")
        layers = [name for name in row if name.startswith("layer_")]
        if layers:
            states = f"{len(row['input_ids'])} states each in {', '.join(layers)}"
            console.print(states, style="dim")
        return
    for message in SeedRow.of(row).conversation.messages:
        role = (f"{message.role}:", "bold")
        console.print(Text.assemble(role, " ", visible(message.content)))
        if message.tool_calls:
            console.print(Text(visible(message.tool_calls), style="dim"))


def coloured_text(row: TokenRow, tokenizer: Any) -> Text:
    """Decode a row's tokens for `inspect`; text that the target wrote has its role's colour."""
    ids, text, at = row.input_ids.tolist(), Text(), 0
    for span in row.spans:
        text.append(visible(tokenizer.decode(ids[at : span.start])), style="dim")
        written = visible(tokenizer.decode(ids[span.start : span.end]))
        text.append(written, style=COLOURS[span.role])
        at = span.end
    text.append(visible(tokenizer.decode(ids[at:])), style="dim")
    return text


def _tokenizer(run: RunDirectory, config: Config) -> Any:
    """Load the export's copy of the tokenizer for `inspect`; without an export, the target's."""
    from pipeline.targets.spec import TargetSpec, load_tokenizer, resolve

    export = run.latest("export")
    if export is not None and export.done:
        return load_tokenizer(TargetSpec(str(export.path)))
    return load_tokenizer(resolve(config.target))


def _find_row(shards: Sequence[Path], wanted: str | None) -> Row:
    """Return the row with this id or number, counted from 0; for None the first row.

    Raises ConfigError if there is no such row.
    """
    number = 0
    for path in shards:
        for row in read_rows(path):
            if wanted in (None, row["id"], str(number)):
                return row
            number += 1
    raise ConfigError(
        f"There is no row '{wanted}' among the {number} rows.",
        shards[0].parent.parent,
        "Give an id, or a number from 0.",
    )
