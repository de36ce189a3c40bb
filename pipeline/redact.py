"""What must not be shown or stored: tokens and passwords, wherever a library puts them into a text.

Limit: known are the values of variables that are named as HF_TOKEN or DB_PASSWORD are, tokens of the Hub's form,
authorization headers, and what stands before the host of a URL.
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
    (re.compile(r"""(?i)(authorization["']?\s*[:=]\s*["']?)(?:(?:bearer|basic) +)?[^\s"',]+"""), r"\1***"),
    (re.compile(r"(://)[^/?#\s@'\"]+@"), r"\1***@"),
)
SHORTEST = 8  # characters of a variable's value; a shorter one is a word that texts have anyway


def redacted(text: str) -> str:
    """The text with `***` for every secret in it."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and VARIABLES.search(name):
            text = text.replace(value, "***")
    for form, instead in FORMS:
        text = form.sub(instead, text)
    return text


def redacted_values(data: Any) -> Any:
    """JSON-like data with every text in it redacted, keys left alone: in encoded JSON a secret may look different."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, Mapping):
        return {key: redacted_values(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redacted_values(value) for value in data]
    return data


@functools.cache
def keep_out_of_logs() -> None:
    """From now on, what any library of this process logs is logged redacted."""
    make = logging.getLogRecordFactory()

    def redacting(*arguments: object, **more: object) -> logging.LogRecord:
        record = make(*arguments, **more)
        with contextlib.suppress(TypeError, ValueError):  # the library's own mistake, for logging to report
            message = record.getMessage()
            if (clean := redacted(message)) != message:
                record.msg, record.args = clean, None
        if isinstance(record.exc_info, tuple) and record.exc_info[0]:
            record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip())
        return record

    logging.setLogRecordFactory(redacting)
