"""The Hub's ids, and the errors of its client as errors for users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.redact import redacted

NETWORK = "Check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk"


def check_repo_id(repo_id: str, where: str, *, with_owner: bool = False) -> None:
    """Raise ConfigError unless this is a Hub id; `with_owner` requires USER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        what = f'"{repo_id}" is neither a Hub id nor an absolute path.'
        raise ConfigError(what, where, "Write a Hub id as USER/NAME.") from error
    if with_owner and "/" not in repo_id:
        raise ConfigError(
            f'"{repo_id}" does not name the owner of the repository.',
            where,
            "Write it as USER/NAME.",
        )


@contextmanager
def hub_errors(subject: str, where: str, *, writes: bool = False) -> Iterator[None]:
    """Translate what the Hub's client raises; the client's own warnings are not shown.

    Args:
        subject: What is read or written, such as `target owner/name`.
        where: The configuration key or the repository.
        writes: Whether files are sent. The client wraps errors of an upload in RuntimeError and
            ValueError too.

    Raises:
        ConfigError: What is read does not exist, or is gated.
        EnvironmentFault: The Hub cannot be reached or refuses. The message never contains the
            token.
    """
    from huggingface_hub import errors as hub

    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    translated: tuple[type[Exception], ...] = (OSError, hub.HTTPError, hub.HFValidationError)
    if writes:
        translated = (*translated, RuntimeError, ValueError)
    try:
        yield
    except MedusaDistillError:
        raise
    except translated as error:
        if writes:
            raise _write_fault(error, subject, where) from None  # its cause may quote the token
        raise _read_fault(error, subject, where) from error


def _read_fault(error: Exception, subject: str, where: str) -> MedusaDistillError:
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        fix = "Accept its terms on its Hub page and log in with `hf auth login`."
        return ConfigError(f"The {subject} is gated.", where, fix)
    if isinstance(
        error, hub.RepositoryNotFoundError | hub.RevisionNotFoundError | hub.HFValidationError
    ):
        fix = (
            "Check the spelling; a private one needs `hf auth login`; a directory is written with"
            " ./ or /."
        )
        return ConfigError(
            f"There is no {subject}, neither as a directory nor on the Hub.", where, fix
        )
    what = f"The {subject} can be neither read nor fetched now ({type(error).__name__})."
    return EnvironmentFault(what, where, f"{NETWORK}, or give a local directory.")


def _write_fault(error: Exception, subject: str, where: str) -> EnvironmentFault:
    from huggingface_hub import errors as hub
    from huggingface_hub import get_token

    what, status = f"The {subject} cannot be written now", 0
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code
        what = f"The Hub answered {status} for the {subject}"
    fix = f"{NETWORK}, then run the same command again: what has arrived is not sent twice."
    if status in (401, 403):
        fix = (
            "The token must be valid and may write there: `hf auth login`, or HF_TOKEN. Then push"
            " again."
        )
    text = str(error)
    if error.__cause__:
        text = f"{text} ({error.__cause__})"
    if token := get_token():
        text = text.replace(token, "hf_***")
    text = " ".join(redacted(text).split()).rstrip(".")
    return EnvironmentFault(f"{what}: {text or type(error).__name__}.", where, fix)
