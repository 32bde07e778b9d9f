"""What the kernel says from its caches alone."""

import os
from pathlib import Path

from crust.host.process import syscalls


def test_is_known_absent_after_a_look_for_a_missing_name_is_true(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    assert not os.path.lexists(path)  # from now on the kernel knows
    assert syscalls.is_known_absent(str(path))
    assert syscalls.is_known_absent(str(path / "below"))


def test_is_known_absent_of_what_is_there_is_false(tmp_path: Path) -> None:
    for name in ("directory", "file", "link"):
        assert not os.path.lexists(tmp_path / name)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("missing")
    for name in ("directory", "file", "link"):
        assert not syscalls.is_known_absent(str(tmp_path / name))


def test_is_known_absent_below_a_file_is_false(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not syscalls.is_known_absent(str(tmp_path / "file" / "below"))
