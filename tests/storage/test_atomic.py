"""What the disk refuses is told as the user's to mend, whichever library met it."""

from __future__ import annotations

import errno
import os

import pytest

from pipeline.errors import DataError, EnvironmentFault
from pipeline.storage.atomic import disk_errors


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EACCES, "cannot be opened or written"),
        (errno.EROFS, "cannot be opened or written"),
    ],
)
def test_a_refusal_of_the_disk_is_one_readable_error(code, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error, disk_errors(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path / "events.jsonl"))
    assert error.value.exit_code == 4 and str(tmp_path) in str(error.value)


def test_other_errors_pass_as_they_are(tmp_path):
    for other in (FileNotFoundError(errno.ENOENT, "no such file"), DataError("a row is damaged"), ValueError("no")):
        with pytest.raises(type(other)) as error, disk_errors(tmp_path):
            raise other
        assert error.value is other
