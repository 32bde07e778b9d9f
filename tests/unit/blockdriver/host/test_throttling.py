"""Limits by control groups v2: the lines of io.max, and the choice of a hierarchy."""

import errno
from pathlib import Path

import pytest

from crust.blockdriver.host import throttling
from crust.blockdriver.host.throttling import NONE, CannotThrottle, Throttle
from crust.core import errors, volumes
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from tests.support.faults import lies

DEVICE = volumes.DeviceIdentity(7, 3, 1)
LIMITS = volumes.IoLimits(10, 20, 30, 40)


def test_io_max_line_names_every_limit() -> None:
    wanted = "7:3 rbps=30 wbps=40 riops=10 wiops=20\n"
    assert throttling.line(DEVICE, LIMITS) == wanted
    assert throttling.line(DEVICE, NONE) == "7:3 rbps=max wbps=max riops=max wiops=max\n"
    many = volumes.IoLimits(read_iops=2**40, read_bytes_per_second=2**40)
    assert throttling.line(DEVICE, many).split()[1:4:2] == [f"rbps={2**40}", f"riops={2**32 - 1}"]


def test_io_max_parse_finds_the_device_among_others() -> None:
    text = "7:33 rbps=1 wbps=1 riops=1 wiops=1\n7:3 rbps=30 wbps=max riops=10 wiops=max new=5\n"
    assert throttling.parse(text, DEVICE) == volumes.IoLimits(10, 0, 30, 0)
    assert throttling.parse("", DEVICE) == NONE
    assert throttling.parse(throttling.line(DEVICE, LIMITS), DEVICE) == LIMITS


def mounted(monkeypatch: pytest.MonkeyPatch, *kinds: tuple[str, Path, str]) -> None:
    mounts = tuple(
        mountinfo.Mount(n, 1, 0, n, "/", str(path), (), fs_type, "none", (options,))
        for n, (fs_type, path, options) in enumerate(kinds, start=2)
    )
    monkeypatch.setattr(mountinfo, "read_all", lambda: mounts)


def hierarchy(root: Path, controllers: str, *groups: str) -> Path:
    root.mkdir()
    (root / "cgroup.controllers").write_text(controllers)
    for group in groups:
        (root / group).mkdir()
        (root / group / "io.max").touch()
    return root


def test_hierarchy_with_the_io_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = hierarchy(tmp_path / "unified", "hugetlb pids\n")
    legacy = tmp_path / "blkio"
    legacy.mkdir()
    mounted(monkeypatch, ("cgroup2", without, ""), ("cgroup", legacy, "blkio"))
    with pytest.raises(CannotThrottle, match=rf"control groups v1 \({legacy}\)"):
        Throttle().check_can_limit()
    Throttle().set(DEVICE, NONE)
    whole = hierarchy(tmp_path / "whole", "cpu io memory\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", whole, ""))
    cgroups = Throttle()
    cgroups.check_can_limit()
    cgroups.set(DEVICE, LIMITS)
    assert (whole / "kubepods" / "io.max").read_text() == throttling.line(DEVICE, LIMITS)
    assert cgroups.limits_of(DEVICE) == LIMITS


def test_group_that_is_not_seen_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", root, ""))
    Throttle().set(DEVICE, LIMITS)

    def removed() -> None:
        cgroups = Throttle()
        cgroups.look()
        assert cgroups.limits_of(DEVICE) == LIMITS
        cgroups.set(DEVICE, NONE)

    for asked in lies.failures(
        removed, lies.Concerns(frozenset(), (str(root),)), errnos_of=lies.all_errnos
    ):
        assert isinstance(asked.error, errors.CrustError), str(asked.failure)
        Throttle().set(DEVICE, LIMITS)


def test_only_the_group_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods.slice", "machine.slice")
    mounted(monkeypatch, ("cgroup2", root, ""))
    Throttle("/machine.slice").set(DEVICE, LIMITS)
    assert (root / "machine.slice" / "io.max").read_text()
    assert not (root / "kubepods.slice" / "io.max").read_text()
    with pytest.raises(CannotThrottle, match="absent"):
        Throttle("/absent").set(DEVICE, LIMITS)
    with pytest.raises(CannotThrottle, match="root group"):
        Throttle("/").set(DEVICE, LIMITS)


def test_missing_hierarchy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch)
    cgroups = Throttle()
    cgroups.set(DEVICE, NONE)
    assert cgroups.limits_of(DEVICE) == NONE
    with pytest.raises(CannotThrottle, match="no control group hierarchy"):
        cgroups.set(DEVICE, LIMITS)
    mounted(monkeypatch, ("cgroup2", hierarchy(tmp_path / "late", "io", "kubepods"), ""))
    cgroups.set(DEVICE, LIMITS)


def test_group_that_vanishes_or_has_no_controller_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = hierarchy(tmp_path / "unified", "io\n", "kubepods")
    mounted(monkeypatch, ("cgroup2", root, ""))

    def gone(*_: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(syscalls, "write_attribute", gone)
    with pytest.raises(CannotThrottle, match="ENODEV"):
        Throttle().set(DEVICE, LIMITS)
    (root / "kubepods" / "io.max").unlink()
    with pytest.raises(CannotThrottle, match=r"\+io"):
        Throttle().check_can_limit()
