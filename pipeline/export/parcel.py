"""What goes to one repository of the Hub, as one commit: prepared and compared first, sent later.

Where several repositories belong together, all are prepared before the first is sent: a refusal publishes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import CommitOperationAdd

from pipeline.errors import ConfigError
from pipeline.export.card_metadata import Licence
from pipeline.export.upload import InTheWay, listing, refuse_local_paths, upload


@dataclass(frozen=True)
class Push:
    """Where heads or a backbone go, and what their card tells.

    Attributes:
        repo_id: USER/NAME.
        report: The content of `report.json`; its check must have passed.
        recipe: The run's resolved configuration as plain data, for the card.
        base_model: Hub id of the heads' target, required where the export names a local directory; or of the model that
            a backbone was tuned from, None for a local one.
        private: Make the repository private; an existing public one is an error, an existing private one stays private.
        dry_run: Only list the files. Uses no network and needs no token.
        licence: What the card declares; None declares nothing.
        data_set: Hub id of the conversations, where they are published.
    """

    repo_id: str
    report: Mapping[str, Any] | None
    recipe: Mapping[str, Any]
    base_model: str | None = None
    private: bool = False
    dry_run: bool = False
    licence: Licence | None = None
    data_set: str | None = None

    @property
    def for_the_card(self) -> dict[str, Any]:
        """What every card is told."""
        return {
            "repo_id": self.repo_id,
            "base_model": self.base_model,
            "recipe": self.recipe,
            "licence": self.licence,
            "data_set": self.data_set,
        }


@dataclass(frozen=True)
class Parcel:
    """The files of one commit; nothing of them names a local path, unless the push is dry."""

    push: Push
    additions: list[CommitOperationAdd]
    message: str
    in_the_way: InTheWay
    how: Mapping[str, Any] = field(default_factory=dict)  # for `upload`

    @classmethod
    def of(
        cls,
        push: Push,
        additions: list[CommitOperationAdd],
        local: str,
        message: str,
        in_the_way: InTheWay,
        **how: Any,
    ) -> Parcel:
        """Files none of which may name the path `local`.

        Raises:
            ConfigError: The target is local.
            DataError: A file names a local path.
        """
        parcel = cls(push, additions, message, in_the_way, how)
        if not push.dry_run:
            if missing := parcel.missing:
                fix = "Publish the target first, then push with push.base_model=USER/NAME."
                raise ConfigError(f"The push lacks {missing[0]}.", push.base_model, fix)
            refuse_local_paths(additions, local, push.recipe)
        return parcel

    @property
    def missing(self) -> list[str]:
        """What a push still requires."""
        if self.push.base_model and os.path.isabs(self.push.base_model):
            return ["the Hub id of the target (push.base_model): nobody else can load a local one"]
        return []

    def send(self) -> dict[str, Any]:
        """Upload the files; return the receipt.

        Returns:
            {"repo", "url", "commit", "unchanged", "private", "base_model", "files": [{"path", "size", "sha256"}]};
            for a dry run also "dry_run": True and "missing", what a push would still require.

        Raises:
            ConfigError: The repository's content conflicts.
            EnvironmentFault: No token, or the Hub could not be reached or rejected the request.
        """
        push = self.push
        receipt = {"repo": push.repo_id, "private": push.private, "base_model": push.base_model}
        receipt |= {"files": listing(self.additions)}
        if push.dry_run:
            return receipt | {"dry_run": True, "commit": None, "missing": self.missing}
        sent = upload(
            self.additions, push.repo_id, self.message, in_the_way=self.in_the_way, private=push.private, **self.how
        )
        return receipt | sent
