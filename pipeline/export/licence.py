"""The licence that a model's own card states."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from yaml import YAMLError

HUB = "https://huggingface.co"
CARD_FILE = "README.md"


@dataclass(frozen=True)
class Licence:
    """A licence as a card states it: the Hub's identifier, and for `other` a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


def licence_of(model: str, revision: str | None, *, online: bool) -> Licence | None:
    """Read the licence of a model; None where there is none or the card cannot be read.

    Args:
        model: A local directory or a Hub id; with `online: False` only what the Hub's cache holds
            is read.
    """
    is_directory = Path(model).is_dir()
    try:
        if is_directory:
            file = str(Path(model, CARD_FILE))
        elif online:
            file = hf_hub_download(model, CARD_FILE, revision=revision)
        else:
            cached = try_to_load_from_cache(
                model, CARD_FILE, cache_dir=constants.HF_HUB_CACHE, revision=revision
            )
            if not isinstance(cached, str):
                return None
            file = cached
        data = ModelCard.load(file, ignore_metadata_errors=True).data
    except (HTTPError, OSError, ValueError, YAMLError):
        return None
    if not isinstance(data.license, str):
        return None
    name = data.license_name if isinstance(data.license_name, str) else None
    link = data.license_link if isinstance(data.license_link, str) else None
    if link and "://" not in link:  # a file beside the card
        link = (
            None
            if is_directory
            else posixpath.join(f"{HUB}/{model}/blob/{revision or 'main'}", link)
        )
    return Licence(data.license, name, link)
