"""The leak check finds what leaks, and removes it."""

import os
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo
from tests.support import leaks

pytestmark = pytest.mark.root


def test_a_leaked_mount_is_found_and_removed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=str(tmp_path)), leaks.checked(tmp_path):
        mount_api.mount_guard(str(tmp_path))
    assert mountinfo.at(str(tmp_path)) is None


def test_a_leaked_loop_device_is_found_and_detached(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(bytes(4096))
    with pytest.raises(AssertionError, match="loop device"), leaks.checked(tmp_path):
        loop.attach(str(tmp_path / "image"))
    assert loop.find(str(tmp_path / "image")) == ()


def test_a_loop_device_of_somebody_else_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    image = tmp_path / "theirs" / "image"
    image.write_bytes(bytes(4096))
    with leaks.checked(tmp_path / "ours"):
        device = loop.attach(str(image))
    loop.detach(device)


def test_leaked_child_is_ended_so_one_bad_test_fails_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="child process"), leaks.checked(tmp_path):
        pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
