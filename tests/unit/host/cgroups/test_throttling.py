"""Limits by control groups: the words of v2, the choice of a hierarchy, and the watch for new groups of v1."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from crust import errors, volumes
from crust.host.cgroups import io_max, throttling, throttling_v1, throttling_watch
from crust.host.cgroups.throttling import NONE, CannotThrottle, Cgroups, NoThrottle
from crust.host.cgroups.throttling_watch import GroupWatch
from crust.host.mounts import mountinfo

DEVICE = volumes.DeviceIdentity(7, 3, 1)
LIMITS = volumes.IoLimits(10, 20, 30, 40)


def test_io_max_line_names_every_limit() -> None:
    wanted = "7:3 rbps=30 wbps=40 riops=10 wiops=20\n"
    assert io_max.line(DEVICE, LIMITS) == wanted
    assert io_max.line(DEVICE, NONE) == "7:3 rbps=max wbps=max riops=max wiops=max\n"
    many = volumes.IoLimits(read_iops=2**40, read_bytes_per_second=2**40)
    assert io_max.line(DEVICE, many).split()[1:4:2] == [
        f"rbps={2**40}",
        f"riops={2**32 - 1}",
    ]


def test_io_max_parse_finds_the_device_among_others() -> None:
    text = "7:33 rbps=1 wbps=1 riops=1 wiops=1\n7:3 rbps=30 wbps=max riops=10 wiops=max new=5\n"
    assert io_max.parse(text, DEVICE) == volumes.IoLimits(10, 0, 30, 0)
    assert io_max.parse("", DEVICE) == NONE
    assert io_max.parse(io_max.line(DEVICE, LIMITS), DEVICE) == LIMITS


def mounted(monkeypatch: pytest.MonkeyPatch, *kinds: tuple[str, Path, str]) -> None:
    found = tuple(
        mountinfo.Mount(n, 1, 0, n, "/", str(path), (), fs_type, "none", (options,))
        for n, (fs_type, path, options) in enumerate(kinds, start=2)
    )
    monkeypatch.setattr(mountinfo, "read_all", lambda: found)


def hierarchy(root: Path, controllers: str, *groups: str) -> Path:
    root.mkdir()
    (root / "cgroup.controllers").write_text(controllers)
    for group in groups:
        (root / group).mkdir()
        (root / group / "io.max").touch()
    return root


def test_cgroups_uses_the_hierarchy_with_the_io_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = hierarchy(tmp_path / "unified", "hugetlb pids\n")
    legacy = tmp_path / "blkio"
    legacy.mkdir()
    mounted(monkeypatch, ("cgroup2", without, ""), ("cgroup", legacy, "blkio"))
    with pytest.raises(CannotThrottle, match=f"kubepods in {legacy}"):
        Cgroups().check()
    whole = hierarchy(tmp_path / "whole", "cpu io memory\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", whole, ""))
    cgroups = Cgroups()
    cgroups.check()
    cgroups.set(DEVICE, LIMITS)
    assert (whole / "kubepods" / "io.max").read_text() == io_max.line(DEVICE, LIMITS)
    assert cgroups.limits_of(DEVICE) == LIMITS


def test_cgroups_uses_only_the_group_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods.slice", "machine.slice")
    mounted(monkeypatch, ("cgroup2", root, ""))
    Cgroups("/machine.slice").set(DEVICE, LIMITS)
    assert (root / "machine.slice" / "io.max").read_text()
    assert not (root / "kubepods.slice" / "io.max").read_text()
    with pytest.raises(CannotThrottle, match="absent"):
        Cgroups("/absent").set(DEVICE, LIMITS)
    with pytest.raises(CannotThrottle, match="root group"):
        Cgroups("/").set(DEVICE, LIMITS)


def test_cgroups_check_without_hierarchy_is_refused_until_one_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch)
    cgroups = Cgroups()
    cgroups.set(DEVICE, NONE)
    assert cgroups.limits_of(DEVICE) == NONE
    with pytest.raises(CannotThrottle, match="no control group hierarchy"):
        cgroups.set(DEVICE, LIMITS)
    mounted(monkeypatch, ("cgroup2", hierarchy(tmp_path / "late", "io", "kubepods"), ""))
    cgroups.set(DEVICE, LIMITS)
    cgroups.close()


def test_set_on_a_vanished_group_raises_cannot_throttle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", root, ""))

    def gone(*_: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(io_max, "_write", gone)
    with pytest.raises(CannotThrottle, match="ENODEV"):
        Cgroups().set(DEVICE, LIMITS)


def test_check_of_an_unwritable_group_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", root, ""))
    (root / "kubepods" / "io.max").unlink()
    with pytest.raises(CannotThrottle, match=r"\+io"):
        Cgroups().check()


def test_a_kernel_without_throttling_refuses_limits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubepods").mkdir()
    mounted(monkeypatch, ("cgroup", tmp_path, "blkio"))
    cgroups = Cgroups()
    assert cgroups.limits_of(DEVICE) == NONE
    cgroups.set(DEVICE, NONE)
    with pytest.raises(CannotThrottle, match="is not there"):
        cgroups.set(DEVICE, LIMITS)


def legacy_group(path: Path) -> Path:
    """A group of v1, as files."""
    path.mkdir()
    for each in throttling_v1._FILES:
        (path / each).touch()
    return path


def test_a_device_that_is_gone_keeps_no_new_group_from_the_lines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = legacy_group(tmp_path / "blkio")
    group = legacy_group(root / "kubepods")
    blkio = throttling_v1.Blkio(str(root), ("kubepods",))
    monkeypatch.setattr(blkio, "_begin_watch", lambda: None)
    gone, other = volumes.DeviceIdentity(7, 9, 1), DEVICE
    for each in (gone, other):
        blkio.set(each, LIMITS)
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if data.startswith(b"7:9 "):
            raise OSError(errno.ENODEV, "No such device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    pod = legacy_group(group / "pod")
    for _ in range(2):
        blkio.tell_new_groups()
        assert (pod / "blkio.throttle.read_iops_device").read_text().strip() == "7:3 10"
    with pytest.raises(OSError, match="No such device"):
        blkio.set(gone, LIMITS)
    blkio.set(gone, NONE)


def test_no_throttle_refuses_limits() -> None:
    throttle: throttling.Throttle = NoThrottle()
    throttle.set(DEVICE, NONE)
    with pytest.raises(CannotThrottle):
        throttle.set(DEVICE, LIMITS)


def test_without_events_a_watch_looks_from_time_to_time_and_a_failure_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoInstance:
        def schedule(self, *_: Any, **__: Any) -> None:
            raise OSError("too many inotify instances")

    monkeypatch.setattr(throttling_watch, "Observer", NoInstance)
    looked = threading.Semaphore(0)

    def look() -> None:
        looked.release()
        raise errors.RuntimeFailed("the kernel says no")

    watch = GroupWatch(str(tmp_path), look, floor_s=0.001)
    for _ in range(3):
        assert looked.acquire(timeout=30)
    watch.stop()


def test_a_watch_looks_when_a_directory_is_made_at_any_depth(tmp_path: Path) -> None:
    looked = threading.Semaphore(0)
    watch = GroupWatch(str(tmp_path), looked.release, floor_s=3600)
    (tmp_path / "pod").mkdir()
    assert looked.acquire(timeout=30)
    (tmp_path / "pod" / "container").mkdir()
    assert looked.acquire(timeout=30)
    watch.stop()
