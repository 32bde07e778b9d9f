"""Files and directories of another user, which only root can make: refused, kept, and reported."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors
from crust.handoff import claims, layout
from crust.handoff.claims import ClaimLock, UntrustedLock
from crust.handoff.store import Store, UntrustedDirectory
from crust.runtime_handler import resolve_source
from tests.support.records.records import TARGET, a_record

pytestmark = pytest.mark.root

STRANGER = 65534


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    made.write(a_record())
    return made


@pytest.fixture
def paths(store: Store) -> layout.EntryPaths:
    return store.layout.entry(TARGET)


@pytest.mark.parametrize("path_of", [lambda paths: paths.record, lambda paths: paths.directory])
def test_directory_or_file_of_another_user_is_an_error_for_every_reader(
    store: Store, paths: layout.EntryPaths, path_of: Callable[[layout.EntryPaths], str]
) -> None:
    os.chown(path_of(paths), STRANGER, STRANGER)
    (entry,) = store.scan()
    assert isinstance(entry.error, errors.Refused)
    assert str(STRANGER) in str(entry.error)
    for attempt in (
        lambda: store.write(a_record()),
        lambda: resolve_source(store.root, TARGET.text),
    ):
        with pytest.raises(errors.Refused):
            attempt()
    assert os.path.exists(paths.record)


def test_lock_of_another_user_is_not_used(store: Store, paths: layout.EntryPaths) -> None:
    Path(paths.claim).write_text("{}")
    os.chown(paths.claim, STRANGER, STRANGER)
    with pytest.raises(errors.Refused):
        claims.read(paths)
    os.chown(paths.claim_lock, STRANGER, STRANGER)
    with pytest.raises(UntrustedLock):
        ClaimLock.acquire(paths, TARGET)
    with pytest.raises(UntrustedLock):
        store.begin_removal(TARGET)


def test_open_refuses_a_root_of_another_user(store: Store) -> None:
    os.chown(store.root, STRANGER, STRANGER)
    with pytest.raises((UntrustedDirectory, errors.Refused), match=str(STRANGER)):
        store.open()
