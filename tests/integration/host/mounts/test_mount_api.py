"""Mounts of the real kernel, in a private namespace."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import holders, loop
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api, mount_options, mount_users, mountinfo
from tests.integration.host.conftest import MIB, Attach, run
from tests.support.raised import raised

pytestmark = pytest.mark.root

LABEL = b"system_u:object_r:container_file_t:s0:c123,c456\0"
"""As a container engine sets it on the root of a volume on nodes with SELinux."""


@pytest.fixture
def ext4(attach: Attach) -> loop.LoopDevice:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    return device


def test_mount_device_shows_in_mountinfo_with_its_options(
    ext4: loop.LoopDevice, mountpoint: str
) -> None:
    mount_api.mount_device(ext4.path, mountpoint, "ext4", ["noatime", "nodev", "data=ordered"])
    mount = mountinfo.at(mountpoint)
    assert mount is not None
    assert (mount.fs_type, mount.source) == ("ext4", ext4.path)
    assert {"rw", "noatime", "nodev"} <= set(mount.options)
    assert mountinfo.of_devices({(mount.major, mount.minor)}) == (mount,)
    assert (mount.major, mount.minor) == (ext4.identity.major, ext4.identity.minor)
    mount_api.unmount(mountpoint)
    mount_api.mount_device(ext4.path, mountpoint, "ext4", readonly=True)
    with pytest.raises(OSError, match="Read-only"):
        (Path(mountpoint) / "x").touch()
    mount = mountinfo.at(mountpoint)
    assert mount is not None
    assert not mount.filesystem_writes


def test_mount_device_overrides_errors_panic_of_the_superblock(
    ext4: loop.LoopDevice, mountpoint: str
) -> None:
    run("tune2fs", "-e", "panic", ext4.path)
    mount_api.mount_device(ext4.path, mountpoint, "ext4")
    in_force = Path(f"/proc/fs/ext4/{Path(ext4.path).name}/options").read_text().split()
    assert "errors=remount-ro" in in_force


@pytest.mark.parametrize("option", ["bogus", "commit=abc"])
def test_mount_device_with_refused_option_reports_the_kernels_reason(
    ext4: loop.LoopDevice, mountpoint: str, option: str
) -> None:
    with pytest.raises(mount_options.InvalidMountOption) as caught:
        mount_api.mount_device(ext4.path, mountpoint, "ext4", [option])
    assert option.partition("=")[0] in caught.value.why
    assert "abc" not in str(caught.value)
    assert mountinfo.at(mountpoint) is None


def test_mount_device_on_a_link_is_refused(
    ext4: loop.LoopDevice, mountpoint: str, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(mountpoint)
    acts: tuple[Callable[[], object], ...] = (
        lambda: mount_api.mount_device(ext4.path, str(link), "ext4"),
        lambda: mount_api.mount_guard(str(link)),
        lambda: mount_api.bind(str(tmp_path), str(link)),
    )
    for act in acts:
        with raised("InvalidMountTarget", match="symbolic link"):
            act()
    assert mountinfo.at(mountpoint) is None


def test_unmount_removes_every_stacked_mount_and_follows_no_link(
    mountpoint: str, tmp_path: Path
) -> None:
    mount_api.mount_guard(mountpoint)
    mount_api.mount_guard(mountpoint)
    (tmp_path / "link").symlink_to(mountpoint)
    mount_api.unmount(str(tmp_path / "link"))
    assert len(mountinfo.stacked_at(mountpoint)) == 2
    mount_api.unmount(mountpoint)
    assert mountinfo.at(mountpoint) is None
    mount_api.unmount(mountpoint)
    mount_api.unmount(f"{mountpoint}/absent")


@pytest.mark.parametrize(
    ("code", "by"),
    [
        ("f = open(sys.argv[1] + '/x', 'w')", "fd"),
        ("os.chdir(sys.argv[1])", "cwd"),
        ("f = open(sys.argv[1] + '/x', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 1); f.close()", "map"),
    ],
)  # fmt: skip
def test_unmount_of_a_busy_mount_names_the_holder(
    ext4: loop.LoopDevice, mountpoint: str, code: str, by: str
) -> None:
    mount_api.mount_device(ext4.path, mountpoint, "ext4")
    program = f"import mmap, os, sys; {code}; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, mountpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(holders.DeviceInUse) as caught:
            mount_api.unmount(mountpoint)
        holder.kill()
    assert {user.pid for user in caught.value.holders} == {holder.pid}
    assert any(user.by.startswith(by) for user in caught.value.holders)
    assert str(holder.pid) in str(caught.value)


def test_unmount_retries_when_busy_for_a_moment(
    mountpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet stats the target at that moment; the search for holders then finds none."""
    mount_api.mount_guard(mountpoint)
    look = os.open(mountpoint, os.O_PATH)
    monkeypatch.setattr(mount_users, "in_use", holders.DeviceInUse)
    with pytest.raises(holders.DeviceInUse, match="does not say what holds it"):
        mount_api.unmount(mountpoint)

    def no_holder(target: str) -> holders.DeviceInUse:
        os.close(look)
        return holders.DeviceInUse(target)

    monkeypatch.setattr(mount_users, "in_use", no_holder)
    mount_api.unmount(mountpoint)
    assert mountinfo.at(mountpoint) is None


def test_unmount_busy_names_mounts_and_loop_devices_on_it(
    ext4: loop.LoopDevice, mountpoint: str
) -> None:
    mount_api.mount_device(ext4.path, mountpoint, "ext4")
    inner = Path(mountpoint) / "inner"
    inner.mkdir()
    mount_api.mount_guard(str(inner))
    image = Path(mountpoint) / "image"
    with image.open("wb") as file:
        file.truncate(MIB)
    device = loop.attach(str(image))
    try:
        with pytest.raises(holders.DeviceInUse) as caught:
            mount_api.unmount(mountpoint)
        assert caught.value.mounts == (str(inner),)
        assert caught.value.loops == (device.path,)
    finally:
        loop.detach(device)
        mount_api.unmount(str(inner))


def test_mount_guard_takes_names_owner_and_mode_but_no_data(mountpoint: str) -> None:
    """A runtime that misses a deferral writes nothing; a kubelet's chown and its mkdir for subPath succeed."""
    mount_api.mount_guard(mountpoint, names=True)
    assert mount_api.takes_names(mountpoint)
    mount = mountinfo.at(mountpoint)
    assert mount is not None
    assert mount_api.is_guard(mount)
    assert {"nosuid", "nodev", "noexec"} <= set(mount.options)
    os.makedirs(f"{mountpoint}/a/b")
    for path in (f"{mountpoint}/f", f"{mountpoint}/a/b/f"):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        try:
            with pytest.raises(OSError, match="No space"):
                os.write(descriptor, b"x")
        finally:
            os.close(descriptor)
    os.chown(mountpoint, 0, 2000)
    os.chmod(mountpoint, 0o2775)
    assert stat.S_IMODE(os.stat(mountpoint).st_mode) == 0o2775


def test_mount_guard_keeps_its_page_and_limits_its_names(mountpoint: str) -> None:
    """The page from everyone but root."""
    mount_api.mount_guard(mountpoint, names=True)
    filler = os.stat(f"{mountpoint}/{mount_api.GUARD_FILLER}")
    assert (filler.st_uid, stat.S_IMODE(filler.st_mode)) == (0, 0o400)
    space = os.statvfs(mountpoint)
    assert (space.f_blocks, space.f_bfree) == (1, 0)
    assert space.f_ffree > 64
    for number in range(space.f_ffree):
        os.mkdir(f"{mountpoint}/{number}")
    with pytest.raises(OSError, match="No space"):
        os.mkdir(f"{mountpoint}/one-more")


def _names(mountpoint: str) -> list[Callable[[], object]]:
    """Every call that makes a name on a filesystem."""
    path = f"{mountpoint}/name"
    return [
        lambda: os.mkdir(path),
        lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)),
        lambda: os.close(os.open(mountpoint, os.O_TMPFILE | os.O_WRONLY)),
        lambda: os.symlink("elsewhere", path),
        lambda: os.mkfifo(path),
        lambda: os.mknod(path, stat.S_IFCHR, os.makedev(1, 3)),
    ]


@pytest.mark.spec("H-39")
@pytest.mark.parametrize("kernel", ["this one", "before 6.6"])
def test_mount_guard_without_names_takes_owner_mode_and_label(
    mountpoint: str, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """A container that misses its volume can make nothing; the kubelet and the container engine set what they set.

    A kernel before 6.6 counts no attributes: there the guard cannot be sealed by one, and a file takes the inode.
    """
    if kernel == "before 6.6":
        monkeypatch.setattr(mount_api, "_is_sealed", lambda _: False)
    mount_api.mount_guard(mountpoint, group=2000)
    assert not mount_api.takes_names(mountpoint)
    for make in _names(mountpoint):
        with pytest.raises(OSError, match="No space"):
            make()
    os.chown(mountpoint, 1000, 2001)
    os.chmod(mountpoint, 0o2775)
    if kernel == "this one":
        os.setxattr(mountpoint, "security.selinux", b"x" * 512)
        os.setxattr(mountpoint, "security.selinux", LABEL)
        assert os.getxattr(mountpoint, "security.selinux") == LABEL
        assert os.listdir(mountpoint) == []
        with pytest.raises(OSError, match="No space"):
            os.mkdir(f"{mountpoint}/name")


def test_is_guard_of_an_ordinary_tmpfs_is_false(mountpoint: str) -> None:
    run("mount", "-t", "tmpfs", "none", mountpoint)
    mount = mountinfo.at(mountpoint)
    assert mount is not None
    assert not mount_api.is_guard(mount)


def test_bind_excludes_mounts_below_the_source(mountpoint: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    mount_api.mount_guard(str(source / "inner"))
    try:
        mount_api.bind(str(source), mountpoint)
        assert mountinfo.below(mountpoint) == ()
    finally:
        mount_api.unmount(str(source / "inner"))


def test_bind_of_absent_or_different_source_is_refused(mountpoint: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for source, target in ((tmp_path / "file", mountpoint), (tmp_path, tmp_path / "file")):
        with raised("InvalidMountTarget"):
            mount_api.bind(str(source), str(target))
    with pytest.raises(errors.NotFound):
        mount_api.bind(str(tmp_path / "none"), mountpoint)
    with pytest.raises(errors.NotFound):
        mount_api.mount_guard(str(tmp_path / "none"))


def test_mount_at_path_with_special_characters_is_found_and_unmounted(tmp_path: Path) -> None:
    target = tmp_path / 'a b\tc\nd\\e#"f, é'
    target.mkdir()
    mount_api.mount_guard(str(target))
    mount = mountinfo.at(str(target))
    assert mount is not None
    assert mount.target == str(target)
    mount_api.unmount(str(target))
    assert mountinfo.at(str(target)) is None


def test_failed_mount_says_why_and_leaves_no_descriptor_open(
    ext4: loop.LoopDevice, mountpoint: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mount_api.mount_device(ext4.path, mountpoint, "ext4")
    mount_api.unmount(mountpoint)
    for options in (["bogus"], ["commit=x"]):
        with pytest.raises(mount_options.InvalidMountOption):
            mount_api.mount_device(ext4.path, mountpoint, "ext4", options)
    with raised("MountFailed", match="no valid xfs"):
        mount_api.mount_device(ext4.path, mountpoint, "xfs")
    with pytest.raises(errors.Unsupported, match="nosuchfs"):
        mount_api.mount_device(ext4.path, mountpoint, "nosuchfs")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_mount_device_xfs_with_duplicate_uuid_fails_with_nouuid_hint(
    attach: Attach, mountpoint: str, tmp_path: Path
) -> None:
    device, clone = attach(300 * MIB), attach(300 * MIB, "clone.img")
    await mkfs.make(device.path, "xfs")
    run("cp", "--sparse=always", device.path, clone.path)
    mount_api.mount_device(device.path, mountpoint, "xfs")
    second = str(tmp_path)
    with raised("MountFailed", match="nouuid"):
        mount_api.mount_device(clone.path, second, "xfs")
    mount_api.mount_device(clone.path, second, "xfs", ["nouuid"])
    mount_api.unmount(second)
