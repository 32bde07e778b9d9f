"""Sockets in short directories: sun_path has 107 bytes."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def short() -> Iterator[str]:
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield root
