"""Redaction of tokens and passwords in texts that are shown or stored.

The known secrets are tokens of the Hub's format, authorization headers, credentials in URLs, and
the values of environment variables with names like HF_TOKEN or DB_PASSWORD, if they have at least
eight characters. Other secrets are not recognized.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

VARIABLES = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY)$", re.IGNORECASE)
FORMS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_***"),
    (
        re.compile(r"""(?i)(authorization["']?\s*[:=]\s*["']?)(?:(?:bearer|basic) +)?[^\s"',]+"""),
        r"\1***",
    ),
    (re.compile(r"(://)[^/?#\s@'\"]+@"), r"\1***@"),
)
SHORTEST = 8  # characters of a variable's value; shorter ones may be ordinary words


def redacted(text: str) -> str:
    """Return a text with `***` in place of the secrets that this module knows."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and VARIABLES.search(name):
            text = text.replace(value, "***")
    for form, instead in FORMS:
        text = form.sub(instead, text)
    return text


def redacted_values(data: Any) -> Any:
    """Return JSON data with `***` in place of known secrets in all texts except keys.

    Call it before JSON encoding, whose escapes could hide a secret.
    """
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, Mapping):
        return {key: redacted_values(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redacted_values(value) for value in data]
    return data


@functools.cache
def keep_out_of_logs() -> None:
    """Redact known secrets in all future log records of this process."""
    make = logging.getLogRecordFactory()

    def redacting(*arguments: object, **more: object) -> logging.LogRecord:
        """Make a log record with known secrets redacted in its message and traceback."""
        record = make(*arguments, **more)
        with contextlib.suppress(TypeError, ValueError):  # malformed; logging reports it
            message = record.getMessage()
            clean = redacted(message)
            if clean != message:
                record.msg, record.args = clean, None
        if isinstance(record.exc_info, tuple) and record.exc_info[0]:
            trace = "".join(traceback.format_exception(*record.exc_info))
            record.exc_text = redacted(trace.rstrip())
        return record

    logging.setLogRecordFactory(redacting)
