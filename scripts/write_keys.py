"""Write the table of `medusa-distill keys` into docs/configuration.md."""

from pathlib import Path

from pipeline.config.reference import reference

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- keys -->\n", "\n<!-- /keys -->"


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + reference() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
