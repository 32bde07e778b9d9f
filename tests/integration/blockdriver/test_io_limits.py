"""ControllerModifyVolume: the kernel is given the limits of the mounted volumes, and no others."""

import os

import pytest

from crust.blockdriver.engines.pool_access import Access, Attachment
from crust.blockdriver.host import throttling
from crust.core import errors, volumes
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.nodes.fake_throttle import FakeThrottle
from tests.support.runtimes.fake_guests import FakeGuests

pytestmark = pytest.mark.root

NONE = volumes.IoLimits()
SENT = {"readIOPS": "3k", "writeBytesPerSecond": "20Mi"}
LIMITS = volumes.IoLimits(read_iops=3000, write_bytes_per_second=20 * MIB)


@pytest.fixture
def kernel() -> FakeThrottle:
    """The lines of a kernel that limits devices; what it makes of them is `test_io_max`'s."""
    return FakeThrottle()


@pytest.fixture
def limited(bench: Bench, kernel: FakeThrottle) -> Bench:
    """A driver of a node that can limit."""
    bench.throttle = kernel
    bench.restart()
    return bench


def in_force(bench: Bench, kernel: FakeThrottle, volume_id: str) -> volumes.IoLimits:
    return kernel.limits_of(bench.host_device(volume_id).identity)


@pytest.mark.parametrize("capability", [mount(), block()], ids=["mount", "block"])
async def test_io_limits_hold_from_publish_to_unstage(
    limited: Bench, kernel: FakeThrottle, capability: volumes.VolumeCapability
) -> None:
    made = await limited.staged(capability=capability, mutable=SENT)
    target = limited.target("pod-a")
    assert in_force(limited, kernel, made) == NONE  # mkfs and fsck are not its user's
    identity = limited.host_device(made).identity
    await limited.publish(made, target, capability)
    assert in_force(limited, kernel, made) == LIMITS
    await limited.down(made, target)
    assert kernel.limits_of(identity) == NONE
    await limited.delete(made)


async def test_modify_without_parameters_is_refused(limited: Bench) -> None:
    made = await limited.create()
    with pytest.raises(errors.InvalidRequest, match="mutable_parameters"):
        await limited.modify(made.volume_id)


async def test_publish_on_a_node_without_io_limits_is_refused(bench: Bench) -> None:
    bench.io_cgroup = "/crust-test-there-is-none"
    bench.restart()
    made, target = await bench.staged(mutable=SENT), bench.target("pod-a")
    with pytest.raises(throttling.CannotThrottle, match="io_cgroup"):
        await bench.publish(made, target)
    assert not os.path.lexists(target)
    published = await bench.publish(made, target, deferred=True)  # its hypervisor limits it
    assert published.deferred_mount.io_limits.read_iops == 3000
    await bench.unpublish(made, target)
    await bench.modify(made, **dict.fromkeys(SENT, "0"))
    await bench.publish(made, target)
    with pytest.raises(throttling.CannotThrottle):
        await bench.modify(made, **SENT)
    await bench.modify(made, readIOPS="0")
    await bench.unpublish(made, target)
    await bench.modify(made, **SENT)  # it is unused: its next node may be able to


async def test_refused_unstage_keeps_the_limits(limited: Bench, kernel: FakeThrottle) -> None:
    made, target = await limited.published(capability=block(), mutable=SENT)
    holder = os.open(limited.host_device(made).path, os.O_RDONLY)
    await limited.unpublish(made, target)
    try:
        with pytest.raises(errors.NotReady):
            await limited.unstage(made)
        assert in_force(limited, kernel, made) == LIMITS
    finally:
        os.close(holder)
    await limited.unstage(made)
    assert set(kernel.lines.values()) <= {NONE}


async def test_publish_does_not_inherit_limits_of_an_earlier_volume(
    limited: Bench, kernel: FakeThrottle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps the limits of a device number; a killed driver left them on the number that is given next."""
    access = limited.driver.stores.access
    throttle = limited.driver.node.io_limits.throttle
    real = access.attach

    def attach(volume_id: volumes.VolumeId, wanted: Access) -> Attachment:
        made = real(volume_id, wanted)
        throttle.set(made.host_device.identity, LIMITS)
        return made

    monkeypatch.setattr(access, "attach", attach)
    made = await limited.create()
    await limited.stage(made.volume_id)
    assert in_force(limited, kernel, made.volume_id) == NONE


async def test_start_restores_the_limits_on_record(limited: Bench, kernel: FakeThrottle) -> None:
    used, idle = await limited.create("used", mutable=SENT), await limited.create("idle")
    target = limited.target("pod-a")
    for volume in (used, idle):
        await limited.stage(volume.volume_id)
    await limited.publish(used.volume_id, target)
    throttle = limited.driver.node.io_limits.throttle
    throttle.set(limited.host_device(used.volume_id).identity, NONE)
    throttle.set(limited.host_device(idle.volume_id).identity, LIMITS)
    limited.restart()
    assert in_force(limited, kernel, used.volume_id) == LIMITS
    assert in_force(limited, kernel, idle.volume_id) == NONE


async def test_limits_follow_a_volume_to_the_host(limited: Bench, kernel: FakeThrottle) -> None:
    limited.runtime_guests = FakeGuests()
    limited.restart()
    made, target = await limited.published(mutable=SENT)
    await limited.unpublish(made, target)
    assert in_force(limited, kernel, made) == LIMITS
    await limited.publish(made, target, deferred=True)
    assert in_force(limited, kernel, made) == NONE  # its hypervisor is in a pod's group
    limited.runtime_guests.add(target)
    await limited.modify(made, readIOPS="50")
    assert in_force(limited, kernel, made) == NONE
    await limited.unpublish(made, target)
    await limited.publish(made, target)
    assert in_force(limited, kernel, made).read_iops == 50


async def test_shared_readers_get_all_limits_or_none(limited: Bench, kernel: FakeThrottle) -> None:
    limited.runtime_guests = end = FakeGuests()
    limited.restart()
    made = await limited.create(mutable=SENT)
    one, two, host = (limited.target(name) for name in ("one", "two", "host"))
    await limited.up(made.volume_id, one, readonly=True, deferred=True)
    await limited.publish(made.volume_id, host, readonly=True)
    await limited.publish(made.volume_id, two, readonly=True, deferred=True)
    assert in_force(limited, kernel, made.volume_id) == LIMITS
    readers = [end.add(target) for target in (one, two)]
    await limited.modify(made.volume_id, readIOPS="50")
    after = volumes.IoLimits(read_iops=50, write_bytes_per_second=20 * MIB)
    assert [reader.applied for reader in readers] == [after] * 2
    assert in_force(limited, kernel, made.volume_id) == after
    readers[1].error = errors.NotReady("the handler cannot limit")
    with pytest.raises(errors.NotReady, match="cannot limit"):
        await limited.modify(made.volume_id, readIOPS="70")
    assert readers[0].applied == after
    assert in_force(limited, kernel, made.volume_id) == after


async def test_copy_has_limits_of_its_own(limited: Bench) -> None:
    made = await limited.create(mutable=SENT)
    copy = await limited.create("copy", size=0, volume=made.volume_id)
    record = limited.driver.stores.volume_records.load(volumes.VolumeId(copy.volume_id))
    assert record.limits.value == NONE
