"""I/O limits of loop devices, by the control groups of the real kernel."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust import errors, volumes
from crust.host.block import loop
from crust.host.cgroups import throttling, throttling_v1
from crust.host.cgroups.throttling import NONE, Cgroups
from tests.integration.host.conftest import MIB, Attach
from tests.support import io_groups, io_race
from tests.support.io_groups import IoGroup

pytestmark = pytest.mark.root

LIMITS = volumes.IoLimits(3000, 4000, 10 * MIB, 20 * MIB)
RACE = str(Path(io_race.__file__))
OPERATIONS_PER_S = 12
KINDS = {
    "r": {"read_iops": OPERATIONS_PER_S},
    "w": {"write_iops": OPERATIONS_PER_S},
    "r bytes": {"read_bytes_per_second": OPERATIONS_PER_S * io_race.BLOCK},
    "w bytes": {"write_bytes_per_second": OPERATIONS_PER_S * io_race.BLOCK},
}


@pytest.fixture
def group() -> Iterator[IoGroup]:
    with io_groups.group() as made:
        yield made


@pytest.fixture
def cgroups(group: IoGroup) -> Iterator[Cgroups]:
    made = Cgroups(group.name)
    yield made
    made.close()


@pytest.fixture
def device(attach: Attach, cgroups: Cgroups) -> Iterator[loop.LoopDevice]:
    made = attach()
    yield made
    cgroups.set(made.identity, NONE)


def lines(group: IoGroup, device: loop.LoopDevice) -> volumes.IoLimits:
    return group.limits_of(device.identity)


def test_set_changes_and_removes_limits(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    cgroups.check()
    assert cgroups.limits_of(device.identity) == NONE
    less = volumes.IoLimits(write_iops=100)
    for limits in (LIMITS, LIMITS, less, NONE, NONE):
        cgroups.set(device.identity, limits)
        assert cgroups.limits_of(device.identity) == limits
        assert lines(group, device) == limits


def test_set_caps_iops_at_the_kernels_maximum(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    cgroups.set(device.identity, volumes.IoLimits(read_iops=2**32 + 5))
    assert lines(group, device).read_iops in (0, 2**32 - 1)  # v2 takes the largest for no limit


def test_set_keeps_the_limits_of_other_devices(
    attach: Attach, group: IoGroup, cgroups: Cgroups
) -> None:
    one, other = attach(name="one.img"), attach(name="other.img")
    cgroups.set(one.identity, LIMITS)
    cgroups.set(other.identity, volumes.IoLimits(read_iops=77))
    cgroups.set(one.identity, NONE)
    assert lines(group, other) == volumes.IoLimits(read_iops=77)
    cgroups.set(other.identity, NONE)


def test_release_stops_limits_from_reaching_the_next_file(
    attach: Attach, group: IoGroup, cgroups: Cgroups
) -> None:
    """Why a driver clears what it attaches: another file on the same number inherits everything."""
    first = attach(name="first.img")
    cgroups.set(first.identity, LIMITS)
    loop.detach(first)
    assert lines(group, first) == LIMITS
    Cgroups(group.name).set(first.identity, NONE)
    assert lines(group, first) == NONE


def test_a_new_process_takes_away_what_a_killed_one_left_in_every_group(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    pod = group.child("pod")
    container = pod.child("container")
    cgroups.set(device.identity, LIMITS)
    Cgroups(group.name).set(device.identity, NONE)
    for each in (group, pod, container):
        assert lines(each, device) == NONE


def test_what_was_set_is_released_and_what_was_not_is_not_even_looked_at(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    cgroups.set(device.identity, LIMITS)
    cgroups.release(device.identity)
    assert lines(group, device) == NONE
    cgroups.release(device.identity)
    if not group.legacy:
        return
    _alone(group).set(device.identity, LIMITS)  # another process, unknown to this one
    cgroups.release(device.identity)
    assert cgroups.limits_of(device.identity) == LIMITS
    cgroups.set(device.identity, NONE)
    assert lines(group, device) == NONE


def test_what_an_earlier_life_set_and_this_one_could_not_settle_is_released(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    """A volume's record may be unreadable at the start; its device goes back without lines all the same."""
    cgroups.set(device.identity, LIMITS)
    Cgroups(group.name).release(device.identity)
    assert lines(group, device) == NONE


@pytest.mark.parametrize("way", ["release", "set"])
def test_release_after_a_failure_is_repeated(
    group: IoGroup,
    cgroups: Cgroups,
    device: loop.LoopDevice,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    def broken(_fd: int, _data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    cgroups.set(device.identity, LIMITS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", broken)
        with pytest.raises(errors.CrustError):
            cgroups.release(device.identity) if way == "release" else cgroups.set(
                device.identity, NONE
            )
    cgroups.release(device.identity)
    assert lines(group, device) == NONE


def test_groups_that_come_later_are_limited(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    cgroups.set(device.identity, LIMITS)
    container = group.child("pod").child("container")
    if not group.legacy:
        return  # v2: whatever is below the group has its limits, see the race
    while lines(container, device) != LIMITS:  # the watch's thread is at it
        os.sched_yield()
    cgroups.set(device.identity, NONE)
    assert lines(container, device) == NONE


def test_groups_that_go_are_no_trouble(
    group: IoGroup, cgroups: Cgroups, device: loop.LoopDevice
) -> None:
    container = group.child("container")
    cgroups.set(device.identity, LIMITS)
    container.path.rmdir()
    cgroups.set(device.identity, volumes.IoLimits(read_iops=50))
    assert lines(group, device) == volumes.IoLimits(read_iops=50)


def test_a_crash_between_any_two_lines_leaves_nothing_that_the_next_process_does_not_see(
    group: IoGroup, device: loop.LoopDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each write in turn, of setting and of taking away: clearing again leaves no line anywhere."""
    container = group.child("container")
    real = os.write

    class Killed(BaseException):
        pass

    for limits_before, limits_after in ((NONE, LIMITS), (LIMITS, NONE)):
        writes = _writes(group, device, limits_before, limits_after, monkeypatch)
        for allowed in range(writes):
            Cgroups(group.name).set(device.identity, limits_before)
            left = [allowed]

            def write(fd: int, data: bytes, left: list[int] = left) -> int:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return real(fd, data)

            monkeypatch.setattr(os, "write", write)
            with pytest.raises(Killed):
                _alone(group).set(device.identity, limits_after)
            monkeypatch.setattr(os, "write", real)
            _alone(group).set(device.identity, NONE)
            for each in (group, container):
                assert lines(each, device) == NONE


def _writes(
    group: IoGroup,
    device: loop.LoopDevice,
    before: volumes.IoLimits,
    after: volumes.IoLimits,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """How many writes there are from `before` to `after`."""
    _alone(group).set(device.identity, before)
    real, count = os.write, [0]

    def write(fd: int, data: bytes) -> int:
        count[0] += 1
        return real(fd, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        _alone(group).set(device.identity, after)
    assert count[0]
    return count[0]


def _alone(group: IoGroup) -> Cgroups:
    """As a new process, and without the watch's thread, which would write beside the one that is killed."""
    made = Cgroups(group.name)
    made.limits_of(volumes.DeviceIdentity(0, 0, 1))
    if isinstance(made._found, throttling_v1.Blkio):
        made._found._begin_watch = lambda: None  # type: ignore[method-assign]
    return made


def test_set_slows_only_the_limited_devices(
    attach: Attach, group: IoGroup, cgroups: Cgroups
) -> None:
    """Each of the four numbers holds, in a group that was there before and in one that comes later."""
    before = group.child("before")
    free = attach(name="free.img")
    limited = {kind: attach(name=f"{kind}.img") for kind in KINDS}
    try:
        for kind, device in limited.items():
            cgroups.set(device.identity, volumes.IoLimits(**KINDS[kind]))
        later = group.child("later")
        while group.legacy and any(
            lines(later, device) == NONE for device in limited.values()
        ):  # the watch's thread is at it
            os.sched_yield()
        for container in (before, later):
            words = [f"{kind[0]}:{device.path}" for kind, device in limited.items()]
            output = container.run(RACE, free.path, *words).split()
            ahead = dict(zip(KINDS, map(int, output), strict=True))
            assert all(each >= 10 * io_race.OPERATIONS for each in ahead.values()), ahead
    finally:
        for device in limited.values():
            cgroups.set(device.identity, NONE)


def test_set_without_limits_slows_no_device(attach: Attach, group: IoGroup) -> None:
    """The race can be lost: what the test above measures are the limits."""
    words = [f"{kind}:{attach(name=f'{kind}.img').path}" for kind in ("r", "w")]
    output = group.child("container").run(RACE, attach(name="free.img").path, *words)
    assert any(int(each) < 10 * io_race.OPERATIONS for each in output.split()), output


def test_check_of_an_absent_group_is_refused(group: IoGroup, device: loop.LoopDevice) -> None:
    absent = Cgroups(f"{group.name}/absent")
    with pytest.raises(throttling.CannotThrottle, match="absent"):
        absent.check()
    with pytest.raises(throttling.CannotThrottle):
        absent.set(device.identity, LIMITS)
    absent.set(device.identity, NONE)
    (group.path / "absent").mkdir()
    if group.legacy:
        absent.check()  # it may come at any time
