"""crust.runtime_handler.resolve with the kernel: guard mounts, binds of them, links to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.core import volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.mounts import mount_api
from crust.runtime_handler import NotDeferred, Resolved, resolve_source
from tests.support.raised import raised
from tests.support.records.records import a_record

pytestmark = pytest.mark.root


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Path]:
    """A kubelet's root with a guarded target in it, `mount`, and an empty `bind`; unmounted afterwards."""
    root = tmp_path / "data" / "kubelet"
    for name in ("mount", "bind", "other"):
        (root / name).mkdir(parents=True)
    mount_api.mount_guard(f"{root}/mount")
    yield root
    for name in ("bind", "mount", "other"):
        mount_api.unmount(f"{root}/{name}")


def _published(store: Store, target: str) -> Record:
    return store.write(a_record(volumes.TargetPath.parse(target))).require()


def test_link_to_the_root_leads_to_the_volume(store: Store, kubelet: Path, tmp_path: Path) -> None:
    (tmp_path / "kubelet").symlink_to(kubelet)
    record = _published(store, f"{tmp_path}/kubelet/mount")
    assert resolve_source(store.root, f"{kubelet}/mount") == Resolved(record, "")
    assert resolve_source(store.root, f"{kubelet}/mount/a/b") == Resolved(record, "a/b")


def test_a_bind_of_a_target_is_the_targets_volume(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/elsewhere")
    record = _published(store, f"{kubelet}/mount")
    mount_api.bind(f"{kubelet}/mount", f"{kubelet}/bind")
    assert resolve_source(store.root, f"{kubelet}/bind") == Resolved(record, "")
    assert resolve_source(store.root, f"{kubelet}/bind/sub") == Resolved(record, "sub")


def test_bind_of_one_of_two_targets_is_its_own(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/mount")
    mount_api.mount_guard(f"{kubelet}/other")
    other = _published(store, f"{kubelet}/other")
    mount_api.bind(f"{kubelet}/other", f"{kubelet}/bind")
    assert resolve_source(store.root, f"{kubelet}/bind") == Resolved(other, "")


@pytest.mark.parametrize("below", ["", "/sub"])
def test_guarded_target_without_entry_is_no_share(store: Store, kubelet: Path, below: str) -> None:
    _published(store, f"{kubelet}/other")
    with raised("GuardWithoutEntry", match="awaits a deferred volume"):
        resolve_source(store.root, f"{kubelet}/mount{below}")


def test_guarded_target_without_record_is_refused(store: Store, kubelet: Path) -> None:
    record = _published(store, f"{kubelet}/mount")
    Path(store.layout.entry(record.target).record).unlink()
    with raised("GuardWithoutEntry"):
        resolve_source(store.root, f"{kubelet}/mount")


def test_directory_beside_a_guarded_one_is_an_ordinary_mount(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/mount")
    assert resolve_source(store.root, f"{kubelet}/bind") == NotDeferred(f"{kubelet}/bind")
