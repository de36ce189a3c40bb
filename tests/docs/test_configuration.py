"""docs/configuration.md is what `medusa-distill keys` prints."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.keys import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_lists_every_key_as_the_command_prints_them():
    block = PAGE.read_text().partition("<!-- keys -->")[2].partition("<!-- /keys -->")[0]
    assert block.strip() == reference(), "run python scripts/write_keys.py"
