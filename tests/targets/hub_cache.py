"""Put a target into the cache of huggingface_hub."""

from __future__ import annotations

import shutil

COMMIT = "c0ffee" + "0" * 34


def cached_at_commit(model, cache, monkeypatch):
    """Put a model into an empty Hub cache, on the branch `tried` alone; return its id.

    The newest commit is not cached.

    Returns its id. Whoever asks for it without a revision finds nothing.
    """
    repository = cache / "models--owner--target"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "tried").write_text(COMMIT)
    shutil.copytree(model, repository / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return "owner/target"
