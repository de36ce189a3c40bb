"""The sizes of the models that configs/ and docs/models.md name (`published.json`).

`config` is as config.json has it on the Hub, `billions` the number of parameters that the authors
state on the card. Of Gemma 3's models with pictures it is the text model's part (`text_config`).
"""

from __future__ import annotations

import json
from pathlib import Path

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def write(hub_id: str, directory: Path) -> Path:
    """Write the model's config.json; enough to plan with."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(PUBLISHED[hub_id]["config"]))
    return directory
