"""crust.runtime_handler.resolve by name. Cases that need the kernel are in tests/integration."""

import os
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.runtime_handler import NotDeferred, Resolved, resolve_source
from tests.support.records.records import TARGET, a_record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    return made


def test_the_target_itself_is_the_whole_volume(store: Store) -> None:
    store.publish(a_record())
    assert resolve_source(store.root, TARGET.text) == Resolved(a_record(), "")


@pytest.mark.parametrize("sub_path", ["a", "a/b", "mount", "with space/ü", "x" * 200])
def test_a_path_below_the_target_is_a_sub_path_of_the_volume(store: Store, sub_path: str) -> None:
    store.publish(a_record())
    found = resolve_source(store.root, f"{TARGET.text}/{sub_path}")
    assert found == Resolved(a_record(), sub_path)


def test_a_source_is_normalised_before_it_is_looked_up(store: Store) -> None:
    store.publish(a_record())
    found = resolve_source(store.root, f"{TARGET.text}//a/./b/../c/")
    assert found == Resolved(a_record(), "a/c")


def test_path_with_the_target_as_string_prefix_is_not_the_target(store: Store) -> None:
    store.publish(a_record())
    for source in (f"{TARGET.text}-2", f"{TARGET.text}/../other", os.path.dirname(TARGET.text)):
        assert resolve_source(store.root, source) == NotDeferred(source)


@pytest.mark.parametrize(
    "source", ["tmpfs", "proc", "shm", "", "/", "/dev", "/nowhere/at/all", "/" + "a" * 300]
)
def test_source_that_is_not_a_deferred_volume_is_not_deferred(store: Store, source: str) -> None:
    store.publish(a_record())
    assert resolve_source(store.root, source) == NotDeferred(source)


def test_the_longest_target_wins(store: Store) -> None:
    outer, inner = a_record("/pods/a"), a_record("/pods/a/inner")
    store.publish(outer)
    store.publish(inner)
    assert resolve_source(store.root, "/pods/a/inner/x") == Resolved(inner, "x")
    assert resolve_source(store.root, "/pods/a/x") == Resolved(outer, "x")


def test_a_source_behind_a_link_finds_the_volume_published_at_the_real_path(
    store: Store, tmp_path: Path
) -> None:
    real = tmp_path / "data" / "kubelet" / "mount"
    real.mkdir(parents=True)
    (tmp_path / "kubelet").symlink_to(tmp_path / "data" / "kubelet")
    store.publish(a_record(f"{real}"))
    found = resolve_source(store.root, f"{tmp_path}/kubelet/mount/sub")
    assert found == Resolved(a_record(f"{real}"), "sub")


@pytest.mark.parametrize("sub_path", ["", "/sub"])
def test_an_unreadable_record_is_an_error_and_not_an_ordinary_mount(
    store: Store, sub_path: str
) -> None:
    store.publish(a_record())
    Path(store.layout.entry(TARGET).record).write_text("{}")
    with pytest.raises(UnreadableHandoffRecord):
        resolve_source(store.root, f"{TARGET.text}{sub_path}")


def test_without_a_directory_nothing_is_deferred(tmp_path: Path) -> None:
    assert resolve_source(f"{tmp_path}/none", TARGET.text) == NotDeferred(TARGET.text)


def test_path_too_long_for_a_target_resolves_below_one(store: Store) -> None:
    store.publish(a_record())
    deep = "/".join(["d" * 200] * 25)
    found = resolve_source(store.root, f"{TARGET.text}/{deep}")
    assert found == Resolved(a_record(), deep)
    assert len(deep) > volumes.PATH_MAX_BYTES


def test_source_with_nul_byte_is_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="NUL"):
        resolve_source(str(tmp_path), "/pods/a\0b")
