"""The trainer's feature shards serve here too."""

from tests.training.conftest import shards  # noqa: F401
