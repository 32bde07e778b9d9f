"""Which deferred volume a mount's source is."""

import os
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.runtime_handler.blocking import NotDeferred, Resolved, resolve_source
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record


def test_sub_path_is_refused_by_runtime_that_mounts_whole_volumes() -> None:
    assert Resolved(a_record(), "").require_whole() == a_record()
    with raised("SubPathUnsupported", match="a/b"):
        Resolved(a_record(), "a/b").require_whole()


DEEP = "/".join(["d" * 200] * 25)


@pytest.mark.parametrize(
    ("below", "sub_path"),
    [
        ("", ""),
        *((f"/{name}", name) for name in ("a", "a/b", "mount", "with space/ü", "x" * 200)),
        ("//a/./b/../c/", "a/c"),
        pytest.param(f"/{DEEP}", DEEP, id="too long for a target"),
    ],
)
def test_path_below_target_is_sub_path_of_the_volume(
    store: Store, below: str, sub_path: str
) -> None:
    assert resolve_source(store.root, f"{TARGET.text}{below}") == Resolved(a_record(), sub_path)
    assert len(DEEP) > volumes.PATH_MAX_BYTES


@pytest.mark.parametrize(
    "source",
    [
        *("/", "/dev", "/nowhere/at/all", "/" + "a" * 300),
        *(f"{TARGET.text}-2", f"{TARGET.text}/../other", os.path.dirname(TARGET.text)),
    ],
)
def test_source_that_is_not_a_deferred_volume_is_not_deferred(store: Store, source: str) -> None:
    assert resolve_source(store.root, source) == NotDeferred(source)
    assert resolve_source(f"{store.root}/none", TARGET.text) == NotDeferred(TARGET.text)
    with pytest.raises(errors.InvalidRequest, match="NUL"):
        resolve_source(store.root, f"{source}/a\0b")


@pytest.mark.spec("H-32")
@pytest.mark.parametrize("source", ["mount", "./mount", "../a/mount", "", "tmpfs"])
def test_relative_source_is_refused(store: Store, source: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="relative"):
        resolve_source(store.root, source)


@pytest.mark.spec("H-32")
def test_longest_target_wins(empty: Store) -> None:
    outer, inner = a_record("/pods/a"), a_record("/pods/a/inner")
    empty.write(outer)
    empty.write(inner)
    assert resolve_source(empty.root, "/pods/a/inner/x") == Resolved(inner, "x")
    assert resolve_source(empty.root, "/pods/a/x") == Resolved(outer, "x")


def test_source_behind_a_link_finds_the_real_volume(empty: Store, tmp_path: Path) -> None:
    real = tmp_path / "data" / "kubelet" / "mount"
    real.mkdir(parents=True)
    (tmp_path / "kubelet").symlink_to(tmp_path / "data" / "kubelet")
    empty.write(a_record(f"{real}"))
    resolved = resolve_source(empty.root, f"{tmp_path}/kubelet/mount/sub")
    assert resolved == Resolved(a_record(f"{real}"), "sub")


@pytest.mark.parametrize("sub_path", ["", "/sub"])
def test_unreadable_record_is_no_ordinary_mount(store: Store, sub_path: str) -> None:
    Path(store.layout.entry(TARGET).record).write_text("{}")
    with pytest.raises(UnreadableHandoffRecord):
        resolve_source(store.root, f"{TARGET.text}{sub_path}")
