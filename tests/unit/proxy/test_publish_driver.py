"""What a publish asks of its driver: deferral, its name, and any id or option."""

import grpc
import pytest

from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode


@pytest.mark.spec("D-4")
async def test_driver_is_sent_the_flag_once_it_advertises_deferral(places: Places) -> None:
    """`backend` is one word of a settings file: a plain driver there would mount on the host at every publish."""
    driver = fake_driver.FakeDriver(defers=False)
    async with FakeNode(places, driver=driver, backend=places.driver) as node, node.handler():
        target = places.target("one")
        words = ("DEFER_FS_OPS", "crust shim")
        await refused(node.co.publish("vol-1", target), Code.UNIMPLEMENTED, *words)
        assert driver.called("NodePublishVolume") == []
        node.check_untouched(target)
        driver.defers = True  # on the same connection
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)


_RPC = csi_pb2.NodeServiceCapability.RPC
GROUP = _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP
POLICY = _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY


@pytest.mark.spec("D-2", "D-6", "D-12")
@pytest.mark.parametrize(
    ("advertised", "sent"),
    [((), ("", "")), ((GROUP,), ("7", "")), ((GROUP, POLICY), ("7", "Always"))],
)
async def test_driver_is_sent_of_a_group_what_it_advertises(
    kata: FakeNode, target: str, advertised: tuple[int, ...], sent: tuple[str, str]
) -> None:
    """The runtime gets the whole."""
    kata.driver.deferral = [_RPC.DEFER_FS_OPS, *advertised]
    given = capability(
        volume_supplemental_group="7", volume_supplemental_group_change_policy="Always"
    )
    await kata.co.publish("vol-1", target, given)
    (call,) = kata.driver.called("NodePublishVolume")
    mount = call.request.volume_capability.mount
    fields = (mount.volume_supplemental_group, mount.volume_supplemental_group_change_policy)
    assert fields == sent
    expected = volumes.GroupChange(7, volumes.GroupPolicy.ALWAYS)
    assert kata.record(target).mount.group == expected


@pytest.mark.spec("D-6")
async def test_delegated_group_reaches_runtime_without_the_driver(
    kata: FakeNode, target: str
) -> None:
    kata.driver.deferral = [_RPC.DEFER_FS_OPS]
    kata.driver.alter = lambda answer: answer.ClearField("supplemental_group")
    await kata.co.publish("vol-1", target, capability(volume_mount_group="7"))
    (call,) = kata.driver.called("NodePublishVolume")
    mount = call.request.volume_capability.mount
    assert (mount.volume_mount_group, mount.volume_supplemental_group) == ("7", "")
    assert kata.record(target).mount.group == volumes.GroupChange(7)


@pytest.mark.spec("D-12")
async def test_group_that_a_driver_makes_up_is_refused(kata: FakeNode, target: str) -> None:
    kata.driver.deferral = [_RPC.DEFER_FS_OPS]
    kata.driver.alter = lambda answer: setattr(answer, "supplemental_group", "8")
    publish = kata.co.publish("vol-1", target, capability(volume_mount_group="7"))
    await refused(publish, Code.INTERNAL, "7 (OnRootMismatch) was requested")
    kata.check_untouched(target)


async def test_capability_is_asked_once_per_connection(kata: FakeNode) -> None:
    for name in ("one", "two", "three"):
        await kata.co.publish(f"vol-{name}", kata.places.target(name))
    # once by the proxy, which the shim passes on, and once by the shim
    assert len(kata.driver.called("NodeGetCapabilities")) == 2


async def test_driver_downgraded_behind_its_socket_is_not_sent_flag(places: Places) -> None:
    """With a volume that a guest has written, the host's kernel would have parsed a hostile filesystem."""
    old, new = fake_driver.FakeDriver(), fake_driver.FakeDriver(defers=False)
    async with FakeNode(places, driver=old) as node, node.handler():
        await node.co.publish("vol-1", places.target("one"))
        await node.enter("driver", fake_driver.serving(new, places.driver))
        publish = node.co.publish("vol-2", places.target("two"), timeout_s=30)
        await refused(publish, Code.UNIMPLEMENTED, "DEFER_FS_OPS")
    assert new.called("NodePublishVolume") == []


async def test_driver_of_another_name_is_refused(kata: FakeNode, target: str) -> None:
    kata.driver.name = "other.example.com"
    await refused(
        kata.co.publish("vol-1", target),
        Code.FAILED_PRECONDITION,
        "'other.example.com'",
        "settings",
    )
    kata.check_untouched(target)


async def test_ids_of_512_bytes_are_deferred_asked_about_and_unpublished(kata: FakeNode) -> None:
    """azuredisk's have up to 250; CSI says 128 and no CO checks."""
    target, volume_id = kata.places.target("one"), "/seg" * 128
    await kata.co.publish(volume_id, target)
    kata.check_published(volume_id, target)
    with kata.sandbox(target):
        assert (await kata.co.stats(volume_id, target)).usage
    await kata.co.unpublish(volume_id, target)
    kata.check_untouched(target)


async def test_options_that_the_driver_does_not_repeat_reach_the_record(
    kata: FakeNode, target: str
) -> None:
    kata.driver.alter = lambda answer: answer.ClearField("mount_options")
    given = capability(mount_flags=["nosuid,noexec", "dirsync", "_netdev"])
    await kata.co.publish("vol-1", target, given)
    assert kata.record(target).mount.mount_options == ("nosuid", "noexec", "dirsync")
