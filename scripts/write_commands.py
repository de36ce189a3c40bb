"""Write the arguments and options of every command into docs/commands.md."""

from pathlib import Path

import typer

from pipeline.cli.app import app

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
BEGIN, END = "<!-- options -->\n", "\n<!-- /options -->"


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + options() + END + rest.partition(END)[2], encoding="utf-8")


def options() -> str:
    """Return a heading and a Markdown table for each command, as typer documents it."""
    group = typer.main.get_command(app)
    lines = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        lines += [f"### {name}", "", "| argument or option | meaning |", "|---|---|"]
        with typer.Context(command, info_name=name) as context:
            for parameter in command.params:
                usage, meaning = parameter.get_help_record(context)
                usage = usage.replace("|", "\\|")
                lines.append(f"| `{usage}` | {meaning} |")
        lines.append("")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main()
