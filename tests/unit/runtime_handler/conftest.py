"""A handoff directory, and the volume in it."""

from pathlib import Path

import pytest

from crust.handoff.store import Store
from tests.support.records.records import a_record


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    return made


@pytest.fixture
def store(empty: Store) -> Store:
    empty.write(a_record())
    return empty
