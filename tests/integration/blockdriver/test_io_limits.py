"""ControllerModifyVolume: the kernel is given the limits of the mounted volumes, and no others."""

import asyncio
import os
import tempfile

import pytest

from crust.blockdriver import serve
from crust.blockdriver.engines.protocol import Access, Attachment
from crust.blockdriver.records import models
from crust.core import errors, volumes
from crust.host.cgroups import throttling
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller, mount
from tests.support.faults.crashes import crash_points
from tests.support.nodes.fake_throttle import FakeThrottle
from tests.support.raised import raised
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


def device_of(bench: Bench, volume_id: str) -> Attachment:
    attachment = bench.driver.stores.access.attached(volumes.VolumeId(volume_id))
    assert attachment is not None
    return attachment


def in_force(bench: Bench, kernel: FakeThrottle, volume_id: str) -> volumes.IoLimits:
    return kernel.limits_of(device_of(bench, volume_id).host_device.identity)


@pytest.mark.parametrize("capability", [mount(), block()], ids=["mount", "block"])
async def test_io_limits_hold_from_publish_to_unstage(
    limited: Bench, kernel: FakeThrottle, capability: volumes.VolumeCapability
) -> None:
    made = await limited.staged(capability=capability, mutable=SENT)
    target = limited.target("pod-a")
    assert in_force(limited, kernel, made) == NONE  # mkfs and fsck are not its user's
    identity = device_of(limited, made).host_device.identity
    await limited.publish(made, target, capability)
    assert in_force(limited, kernel, made) == LIMITS
    await limited.unpublish(made, target)
    await limited.unstage(made)
    assert kernel.limits_of(identity) == NONE
    await limited.delete(made)


async def test_modify_keeps_limits_it_does_not_name(limited: Bench, kernel: FakeThrottle) -> None:
    made, _ = await limited.published()
    assert in_force(limited, kernel, made) == NONE
    for _ in range(2):
        await limited.modify(made, **SENT)
        assert in_force(limited, kernel, made) == LIMITS
    await limited.modify(made, writeIOPS="77", readIOPS="0")
    after = volumes.IoLimits(write_iops=77, write_bytes_per_second=20 * MIB)
    assert in_force(limited, kernel, made) == after
    await limited.modify(made, writeIOPS="0", writeBytesPerSecond="0")
    assert in_force(limited, kernel, made) == NONE


@pytest.mark.parametrize(
    "sent",
    [{"readIOPS": "50", "iops": "1"}, {"readIOPS": "50", "writeIOPS": "9"}, {"readIOPS": "fast"}],
    ids=["unknown", "too-little", "no-number"],
)
async def test_modify_with_one_invalid_key_changes_nothing(
    limited: Bench, kernel: FakeThrottle, sent: dict[str, str]
) -> None:
    made, _ = await limited.published(mutable=SENT)
    with pytest.raises(errors.InvalidRequest):
        await limited.modify(made, **sent)
    assert in_force(limited, kernel, made) == LIMITS
    assert limited.driver.stores.volume_records.load(volumes.VolumeId(made)).limits.value == LIMITS
    with pytest.raises(errors.InvalidRequest):
        await limited.create("other", mutable=sent)


async def test_modify_request_is_validated_by_the_csi_rules(limited: Bench) -> None:
    with pytest.raises(errors.InvalidRequest, match="volume_id"):
        await limited.modify("", **SENT)
    made = await limited.create()
    with pytest.raises(errors.InvalidRequest, match="mutable_parameters"):
        await limited.modify(made.volume_id)
    with pytest.raises(models.VolumeNotFound):
        await limited.modify(limited.ids.volume_id("other"), **SENT)
    with raised("UnknownMutableParameter"):
        await limited.modify(limited.ids.volume_id("other"), iops="1")
    await limited.modify(made.volume_id, **{"csi.storage.k8s.io/pvc/name": "data"})


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
    holder = os.open(device_of(limited, made).host_device.path, os.O_RDONLY)
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
    throttle = limited.driver.node_rules.io_limits.throttle
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
    for each in (used, idle):
        await limited.stage(each.volume_id)
    await limited.publish(used.volume_id, target)
    throttle = limited.driver.node_rules.io_limits.throttle
    throttle.set(device_of(limited, used.volume_id).host_device.identity, NONE)
    throttle.set(device_of(limited, idle.volume_id).host_device.identity, LIMITS)
    limited.restart()
    assert in_force(limited, kernel, used.volume_id) == LIMITS
    assert in_force(limited, kernel, idle.volume_id) == NONE


def test_killed_modify_has_all_limits_or_none(limited: Bench, kernel: FakeThrottle) -> None:
    made = asyncio.run(limited.create(mutable=SENT))
    target = limited.target("pod-a")
    asyncio.run(limited.stage(made.volume_id))
    asyncio.run(limited.publish(made.volume_id, target))
    change = {"readIOPS": "0", "writeIOPS": "55", "writeBytesPerSecond": "1Mi"}
    after = volumes.IoLimits(write_iops=55, write_bytes_per_second=MIB)
    seen = set()
    points = 0
    for _ in crash_points(
        lambda _: asyncio.run(limited.modify(made.volume_id, **SENT, writeIOPS="0")),
        lambda _: asyncio.run(limited.modify(made.volume_id, **change)),
    ):
        limited.restart()
        seen.add(in_force(limited, kernel, made.volume_id))
        asyncio.run(limited.modify(made.volume_id, **change))
        assert in_force(limited, kernel, made.volume_id) == after
        points += 1
    assert seen == {LIMITS, after}
    assert points > 10
    asyncio.run(limited.unpublish(made.volume_id, target))
    asyncio.run(limited.unstage(made.volume_id))


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
    await limited.stage(made.volume_id)
    await limited.publish(made.volume_id, one, readonly=True, deferred=True)
    await limited.publish(made.volume_id, host, readonly=True)
    await limited.publish(made.volume_id, two, readonly=True, deferred=True)
    assert in_force(limited, kernel, made.volume_id) == LIMITS
    readers = [end.add(each) for each in (one, two)]
    await limited.modify(made.volume_id, readIOPS="50")
    after = volumes.IoLimits(read_iops=50, write_bytes_per_second=20 * MIB)
    assert [each.applied for each in readers] == [after] * 2
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


async def test_validate_confirms_the_present_limits(limited: Bench) -> None:
    made = await limited.create(mutable=SENT)
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=made.volume_id,
        volume_capabilities=[csi.capability_to_wire(mount())],
        mutable_parameters=SENT,
    )
    validate = limited.driver.controller.ValidateVolumeCapabilities
    assert dict((await validate(request, caller())).confirmed.mutable_parameters) == SENT
    request.mutable_parameters["readIOPS"] = "11"
    refused = await validate(request, caller())
    assert not refused.HasField("confirmed")
    assert "mutable_parameters" in refused.message


async def test_start_sends_the_guest_an_interrupted_change(limited: Bench) -> None:
    limited.runtime_guests = end = FakeGuests()
    limited.restart()
    made, target = await limited.published(mutable=SENT, deferred=True)
    guest = end.add(target)
    guest.error = errors.PeerUnavailable("killed before the call")
    with pytest.raises(errors.PeerUnavailable):
        await limited.modify(made, readIOPS="50")
    guest.error = None
    limited.restart()
    with tempfile.TemporaryDirectory(prefix="crust-") as short:
        async with serve.running(
            limited.driver,
            socket=f"{short}/csi.sock",
            run_dir=str(limited.root / "run"),
        ):
            await guest.limited.wait()
    assert guest.limits.read_iops == 50
    assert end.closed
    limited.restart()


async def test_second_change_at_once_is_aborted(limited: Bench, kernel: FakeThrottle) -> None:
    made = await limited.create(mutable=SENT)
    target = limited.target("pod-a")
    await limited.stage(made.volume_id, block())
    await limited.publish(made.volume_id, target, block())
    outcomes = await asyncio.gather(
        limited.grow(made.volume_id, 128 * MIB),
        limited.modify(made.volume_id, readIOPS="50"),
        return_exceptions=True,
    )
    assert sum(isinstance(each, errors.OperationPending) for each in outcomes) == 1
    await limited.grow(made.volume_id, 128 * MIB)
    await limited.modify(made.volume_id, readIOPS="50")
    assert in_force(limited, kernel, made.volume_id).read_iops == 50
    assert device_of(limited, made.volume_id).size_bytes == 128 * MIB
