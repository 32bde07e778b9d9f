"""Loop devices of the real kernel: attach, detach, the races that the kernel leaves to its users, and the search."""

import fcntl
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import devices, holders, loop, loopctl, users
from crust.host.files import sparse
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach, MakeFile, run

pytestmark = pytest.mark.root

_CTL_ADD, _CTL_REMOVE = 0x4C80, 0x4C81


def test_attach_reports_the_granted_direct_io(attach: Attach, mountpoint: str) -> None:
    """Whatever the backing filesystem makes of the wish, the result is what the kernel says in sysfs."""
    device = attach()
    granted = Path(f"/sys/block/loop{device.number}/loop/dio").read_text().strip() == "1"
    assert device.direct_io == granted
    run("mount", "-t", "ramfs", "none", mountpoint)
    backing = Path(mountpoint) / "volume.img"
    backing.write_bytes(bytes(MIB))
    for buffered in (loop.attach(device.backing, direct_io=False), loop.attach(str(backing))):
        assert not buffered.direct_io
        loop.detach(buffered)


def test_attach_sets_the_sector_size_and_rounds_down_to_it(attach: Attach) -> None:
    """512 bytes, whatever the kernel would choose for the file."""
    device = attach(MIB + 1023)
    queue = Path(f"/sys/block/loop{device.number}/queue/logical_block_size")
    assert queue.read_text().strip() == "512"
    assert devices.size_bytes(device.path) == MIB + 512


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--offset=1048576", "an offset"),
        ("--sizelimit=1048576", "an offset"),
        ("--read-only", "read-only"),
    ],
)
def test_attach_once_refuses_an_offset_a_limit_and_read_only(
    sparse_file: MakeFile, option: str, why: str
) -> None:
    """Whoever looked into an image by hand may have left one: what is written to it lands elsewhere in the volume."""
    backing = sparse_file()
    run("losetup", "--find", option, backing)
    [device] = loop.find(backing)
    with pytest.raises(loop.LoopAttachedDifferently, match=why):
        loop.attach(backing, once=True)
    loop.detach(device)
    loop.detach(loop.attach(backing, once=True))


def test_detach_makes_a_read_only_number_writable_again(attach: Attach) -> None:
    device = attach()
    devices.set_readonly(device.path, readonly=True)
    loop.detach(device)
    again = attach_at(device.number, device.backing)
    try:
        assert not devices.is_readonly(again.path)
    finally:
        loop.detach(again)


def test_attach_once_with_two_devices_on_the_file_is_refused(attach: Attach) -> None:
    first = attach()
    second = loop.attach(first.backing)
    in_order = sorted((first, second), key=lambda device: device.number)
    paths = ", ".join(device.path for device in in_order)
    with pytest.raises(loop.LoopAttachedDifferently, match=f"attached at {paths}"):
        loop.attach(first.backing, once=True)


def test_detach_twice_succeeds(attach: Attach) -> None:
    device = attach()
    loop.detach(device)
    assert loop.find(device.backing) == ()
    assert not loopctl.is_bound(device.number)
    loop.detach(device)


@pytest.fixture
def unused_number() -> Iterator[int]:
    """The number of a loop device that no other process is given, because it is the highest."""
    with open("/dev/loop-control", "r+b", buffering=0) as control:
        number = 100_000 + os.getpid()
        fcntl.ioctl(control, _CTL_ADD, number)
        yield number
        fcntl.ioctl(control, _CTL_REMOVE, number)


def attach_at(number: int, backing: str) -> loop.LoopDevice:
    """Attach to the loop device of this number."""
    with (
        open(backing, "r+b") as file,
        open(loopctl.ensure_node(number), "r+b", buffering=0) as device,
    ):
        config = loopctl.configuration(file.fileno(), 0, backing)
        fcntl.ioctl(device, loopctl.CONFIGURE, config)
    (attached,) = loop.find(backing)
    return attached


def test_detach_leaves_a_reused_number(unused_number: int, sparse_file: MakeFile) -> None:
    old = attach_at(unused_number, sparse_file(name="old.img"))
    loop.detach(old)
    new = attach_at(unused_number, sparse_file(name="new.img"))
    try:
        assert (new.path, new.identity == old.identity) == (old.path, False)
        loop.detach(old)
        assert loop.find(new.backing) == (new,)
        hold = devices.open_exclusive(new.path)
        loop.detach(old)  # not even opened: else this would be refused
        os.close(hold)
        with pytest.raises(errors.NotFound):
            loop.refresh_size(old)
    finally:
        loop.detach(new)


def test_detach_of_number_reused_during_call_leaves_new_device(
    unused_number: int, sparse_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process detaches it and attaches a file to its number, after the look and before the open."""
    old = attach_at(unused_number, sparse_file(name="old.img"))
    real = loop.is_attached
    other: list[loop.LoopDevice] = []

    def looks(device: loop.LoopDevice) -> bool:
        attached = real(device)
        if not other:
            run("losetup", "--detach", device.path)
            other.append(attach_at(unused_number, sparse_file(name="new.img")))
        return attached

    with monkeypatch.context() as patched:
        patched.setattr(loop, "is_attached", looks)
        loop.detach(old)
    (new,) = other
    assert loop.find(new.backing) == (new,)
    loop.detach(new)


def test_detach_of_a_mounted_device_is_refused(attach: Attach, mountpoint: str) -> None:
    """The kernel's own detach reports success and lets the device vanish at the unmount."""
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    mount_api.mount_device(device.path, mountpoint, "ext4")
    with pytest.raises(holders.DeviceInUse, match=mountpoint):
        loop.detach(device)
    mount_api.unmount(mountpoint)
    assert loop.find(device.backing) == (device,)


def test_detach_of_open_device_is_refused_and_keeps_it_attached(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopctl, "_GONE_TIMEOUT_S", 0.05)
    device = attach()
    holder = os.open(device.path, os.O_RDONLY)
    try:
        with pytest.raises(holders.DeviceInUse) as caught:
            loop.detach(device)
        assert [holder.pid for holder in caught.value.holders] == [os.getpid()]
    finally:
        os.close(holder)
    assert loop.find(device.backing) == (device,)


def test_detach_waits_for_a_brief_holder(attach: Attach) -> None:
    """udev opens a device that was written to, for a moment."""
    device = attach()
    ready, leave = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        fd = os.open(device.path, os.O_RDONLY)
        ready.set()
        # Until the clear has marked the device: from then on, closing is what detaches it.
        while not loopctl.status(fd).flags & loopctl.AUTOCLEAR:
            leave.wait(0.001)
        os.close(fd)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    ready.wait()
    loop.detach(device)
    process.join()
    assert loop.find(device.backing) == ()


def test_detach_waits_for_a_brief_hold_whose_user_is_unseen(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the mount namespace of a killed program after its process: nothing shows who has the device."""
    device = attach()
    held = os.open(device.path, os.O_RDONLY | os.O_EXCL)

    def look(path: str) -> holders.DeviceInUse:
        os.close(held)
        return holders.DeviceInUse(path)

    monkeypatch.setattr(users, "in_use", look)
    loop.detach(device)
    assert loop.find(device.backing) == ()


def _attach_once(path: str, count: int) -> list[str]:
    paths: list[str] = []
    while len(paths) < count:
        try:
            paths.append(loop.attach(path, once=True).path)
        except errors.OperationPending:
            continue
    return paths


def test_attach_once_in_a_race_for_one_file_attaches_once(sparse_file: MakeFile) -> None:
    path = sparse_file()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        answers = pool.starmap(_attach_once, [(path, 10)] * 8)
        pool.close()
        pool.join()
    try:
        assert len({device for answer in answers for device in answer}) == 1
        assert len(loop.find(path)) == 1
    finally:
        for device in loop.find(path):
            loop.detach(device)


def _attach_many(paths: list[str]) -> list[tuple[str, int]]:
    return [(path, loop.attach(path).number) for path in paths]


def test_attach_in_a_race_gives_each_file_its_own_device(sparse_file: MakeFile) -> None:
    """Between "number is free" and the configuration another process takes the number: EBUSY, and again."""
    paths = [sparse_file(MIB, f"{number}.img") for number in range(40)]
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        attached = [
            pair
            for pairs in pool.map(_attach_many, [paths[n::4] for n in range(4)])
            for pair in pairs
        ]
        pool.close()
        pool.join()
    try:
        assert len({number for _, number in attached}) == 40
        for path, number in attached:
            assert [device.number for device in loop.find(path)] == [number]
    finally:
        for path in paths:
            for device in loop.find(path):
                loop.detach(device)


def test_attach_of_another_file_type_is_refused(tmp_path: Path, sparse_file: MakeFile) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(sparse_file())
    with pytest.raises(errors.InvalidRequest):
        loop.attach(str(tmp_path / "pipe"))
    with pytest.raises(errors.Refused):
        loop.attach(str(tmp_path / "link"))
    with pytest.raises(errors.NotFound):
        loop.attach(str(tmp_path / "none"))
    assert loop.find(str(tmp_path / "none")) == ()


def test_attach_creates_a_missing_device_node(attach: Attach) -> None:
    device = attach()
    os.unlink(device.path)
    assert loopctl.ensure_node(device.number) == device.path
    assert devices.identify(device.path) == device.identity


def test_find_matches_by_inode_and_not_by_name(attach: Attach, tmp_path: Path) -> None:
    device = attach()
    os.rename(device.backing, tmp_path / "renamed")
    os.link(tmp_path / "renamed", tmp_path / "second-name")
    (tmp_path / "link").symlink_to("renamed")
    for name in ("renamed", "second-name", "link"):
        [attached] = loop.find(str(tmp_path / name))
        assert attached.identity == device.identity
    assert loop.find(device.backing) == ()
    os.rename(tmp_path / "renamed", device.backing)


def test_find_ignores_a_new_file_under_an_old_name(attach: Attach, sparse_file: MakeFile) -> None:
    device = attach()
    os.unlink(device.backing)
    assert loop.find(sparse_file()) == ()
    assert f"{device.backing} (deleted)" in {
        attached.backing for attached in loop.list_named(lambda _: True)
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


def test_find_and_attach_open_only_devices_with_the_files_name(
    attach: Attach, sparse_file: MakeFile, opened: list[str]
) -> None:
    device = attach(name="only-of-this-test.img (deleted)")  # which is how a removed one is shown
    attach(name="other.img")
    absent = sparse_file(name="detached-only-of-this-test.img")
    opened.clear()
    assert loop.find(device.backing) == (device,)
    assert opened == [device.path]
    opened.clear()
    assert loop.attach(device.backing, once=True) == device
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


def test_device_whose_attacher_had_mount_that_is_gone_is_found(
    sparse_file: MakeFile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As after a container: from then on the kernel shows the path of the file without that of the mount."""
    directory, name = os.path.split(sparse_file())
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    own_mounts = ("unshare", "--mount", "--propagation", "private")
    run(*own_mounts, sys.executable, "-c", _ATTACH_BELOW, directory, elsewhere, name)
    [device] = loop.find(f"{directory}/{name}")
    try:
        assert device.backing == f"/{name}"
        assert loop.attach(f"{directory}/{name}", once=True) == device
        assert sparse.has_writers(f"{directory}/{name}")
        named = loop.list_named(lambda shown: shown == name)
        assert [other.identity for other in named if other.tag == "mark"] == [device.identity]
    finally:
        loop.detach(device)


def test_list_named_opens_only_devices_it_wants(attach: Attach, opened: list[str]) -> None:
    device, _ = attach(name="mine.img"), attach(name="other.img")
    os.unlink(device.backing)
    opened.clear()
    [named] = loop.list_named(lambda name: name == "mine.img")
    assert named.identity == device.identity
    assert opened == [device.path]
    loop.detach(device)


def test_tag_of_63_bytes_is_kept_after_file_is_removed(sparse_file: MakeFile) -> None:
    backing, tag = sparse_file(), "t" * loopctl.TAG_MAX_BYTES
    device = loop.attach(backing, tag=tag, once=True)
    try:
        os.unlink(backing)
        attached = {other.identity: other for other in loop.list_named(lambda _: True)}
        same = attached[device.identity]
        assert (same.tag, same.file) == (tag, device.file)
        assert devices.size_of(device.identity) == 64 * MIB
    finally:
        loop.detach(device)
    assert devices.size_of(device.identity) == 0
