"""A Hub target as the Hub's client keeps it on a machine."""

from __future__ import annotations

import shutil

COMMIT = "c0ffee" + "0" * 34


def cached_at_commit(model, cache, monkeypatch):
    """Put a model into an empty cache, as the branch `tried` alone: the newest commit is not there.

    Returns its id. Whoever asks for it without a revision finds nothing.
    """
    repository = cache / "models--owner--target"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "tried").write_text(COMMIT)
    shutil.copytree(model, repository / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return "owner/target"
