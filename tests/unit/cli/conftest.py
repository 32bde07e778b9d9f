"""Where a node's files are."""

from pathlib import Path

import pytest


@pytest.fixture
def root(short_dir: Path) -> Path:
    """Where the files of a node are."""
    return short_dir
