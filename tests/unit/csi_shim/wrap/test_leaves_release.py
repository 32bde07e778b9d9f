"""The removal of a leaf: its empty directory goes too, and another leaf's directory stays."""

import errno
import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.csi_shim.wrap import leaves


@pytest.fixture
def leaf(tmp_path: Path) -> str:
    (tmp_path / "crust-v").mkdir()
    (tmp_path / "crust-v/leaf").touch()
    return str(tmp_path / "crust-v/leaf")


def test_release_removes_leaf_and_empty_directory(leaf: str) -> None:
    assert leaves.release(leaf) == 0
    assert not os.path.exists(os.path.dirname(leaf))
    assert leaves.release(leaf) == 0


def test_release_keeps_directory_of_another_leaf(leaf: str) -> None:
    Path(f"{leaf}-2").touch()
    assert leaves.release(leaf) == 0
    assert os.listdir(os.path.dirname(leaf)) == ["leaf-2"]


def test_directory_that_cannot_be_removed_refuses_release(
    leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    monkeypatch.setattr(os, "rmdir", busy)
    with pytest.raises(errors.NotReady, match="EBUSY"):
        leaves.release(leaf)
    monkeypatch.undo()
    assert leaves.release(leaf) == 0
