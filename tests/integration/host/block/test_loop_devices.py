"""The search for loop devices of the real kernel: by the file, and without opening what other programs have."""

import os
import sys
from pathlib import Path

import pytest

from crust.host.block import loop, loopctl
from crust.host.files import sparse
from tests.integration.host.conftest import MIB, Attach, MakeFile, run

pytestmark = pytest.mark.root


def test_find_matches_by_inode_and_not_by_name(attach: Attach, tmp_path: Path) -> None:
    device = attach()
    os.rename(device.backing, tmp_path / "renamed")
    os.link(tmp_path / "renamed", tmp_path / "second-name")
    (tmp_path / "link").symlink_to("renamed")
    for name in ("renamed", "second-name", "link"):
        assert [found.identity for found in loop.find(str(tmp_path / name))] == [device.identity]
    assert loop.find(device.backing) == ()
    os.rename(tmp_path / "renamed", device.backing)


def test_find_ignores_a_new_file_under_an_old_name(attach: Attach, sparse_file: MakeFile) -> None:
    device = attach()
    os.unlink(device.backing)
    assert loop.find(sparse_file()) == ()
    assert f"{device.backing} (deleted)" in {
        found.backing for found in loop.list_named(lambda _: True)
    }
    loop.detach(device)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the devices that are opened, in order."""
    paths: list[str] = []
    really = os.open

    def counting(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).startswith("/dev/loop"):
            paths.append(str(path))
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counting)
    return paths


def test_find_and_attach_once_open_only_devices_whose_file_has_the_name(
    attach: Attach, sparse_file: MakeFile, opened: list[str]
) -> None:
    device = attach(name="only-of-this-test.img (deleted)")  # which is how a removed one is shown
    attach(name="other.img")
    absent = sparse_file(name="detached-only-of-this-test.img")
    opened.clear()
    assert loop.find(device.backing) == (device,)
    assert opened == [device.path]
    opened.clear()
    assert loop.attach_once(device.backing) == device
    assert opened == [device.path]
    opened.clear()
    assert loop.find(absent) == ()
    assert opened == []


_ATTACH_BELOW = """
import subprocess, sys
from crust.host.block import loop
directory, elsewhere, name = sys.argv[1:]
subprocess.run(["mount", "--bind", directory, elsewhere], check=True)
loop.attach(f"{elsewhere}/{name}", tag="mark")
"""


def test_device_whose_attacher_had_a_mount_that_is_gone_is_found(
    sparse_file: MakeFile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As after a container: from then on the kernel shows the path of the file without that of the mount."""
    directory, name = os.path.split(sparse_file())
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    own_mounts = ("unshare", "--mount", "--propagation", "private")
    run(*own_mounts, sys.executable, "-c", _ATTACH_BELOW, directory, elsewhere, name)
    found = loop.find(f"{directory}/{name}")
    try:
        assert [each.backing for each in found] == [f"/{name}"]
        assert loop.attach_once(f"{directory}/{name}") == found[0]
        assert sparse.has_writers(f"{directory}/{name}")
        named = loop.list_named(lambda each: each == name)
        assert [each.identity for each in named if each.tag == "mark"] == [found[0].identity]
    finally:
        for each in found:
            loop.detach(each)


def test_list_named_opens_only_devices_it_wants(attach: Attach, opened: list[str]) -> None:
    device, _ = attach(name="mine.img"), attach(name="other.img")
    os.unlink(device.backing)
    opened.clear()
    [found] = loop.list_named(lambda name: name == "mine.img")
    assert found.identity == device.identity
    assert opened == [device.path]
    loop.detach(device)


def test_tag_of_63_bytes_is_kept_after_the_file_is_removed(sparse_file: MakeFile) -> None:
    backing, tag = sparse_file(), "t" * loopctl.TAG_MAX_BYTES
    device = loop.attach_once(backing, tag=tag)
    try:
        os.unlink(backing)
        [found] = [
            each for each in loop.list_named(lambda _: True) if each.identity == device.identity
        ]
        assert (found.tag, found.file) == (tag, device.file)
        assert loop.size_bytes(device) == 64 * MIB
    finally:
        loop.detach(device)
    assert loop.size_bytes(device) == 0
