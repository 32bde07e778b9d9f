"""The change of a group: its progress, its end, and a freeze in between."""

from pathlib import Path

import pytest

from examples.kata.guest.agent import freeze, fs_group, ownership, protocol


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number in range(10):
        (tmp_path / str(number)).write_text("x")
    return tmp_path


def _change(tree: Path, volume_freeze: freeze.VolumeFreeze) -> ownership.GroupChange:
    gid = tree.stat().st_gid
    return ownership.GroupChange(str(tree), gid, fs_group.ALWAYS, volume_freeze)


def test_group_change_reports_its_progress_and_its_end(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_BATCH", 3)
    change = _change(tree, freeze.VolumeFreeze())
    assert change.progress(20) == {"done": True, "owned_entries": 11}


def test_group_change_lets_freeze_in_between_and_can_be_cancelled(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_BATCH", 1)
    volume_freeze = freeze.VolumeFreeze()
    with volume_freeze.changing():
        volume_freeze._freezing = True  # a freeze waits for this change, and goes first
    change = _change(tree, volume_freeze)
    assert change.progress(0) == {"done": False, "owned_entries": 0}
    change._cancelled = True
    with volume_freeze.lock:
        volume_freeze._freezing = False
        volume_freeze.lock.notify_all()
    change.cancel()
    with pytest.raises(protocol.Fault, match="ended before"):
        change.progress(0)


def test_group_change_that_fails_says_so_to_who_asks(tmp_path: Path) -> None:
    change = ownership.GroupChange(
        str(tmp_path / "absent"), 1, fs_group.ALWAYS, freeze.VolumeFreeze()
    )
    with pytest.raises(protocol.Fault, match="not_found"):
        change.progress(20)
    assert change.failed
