"""What the proxy asks a driver before it defers, how often, and what passes between the two unchanged."""

import grpc
import pytest

from crust.proxy import app
from crust.rpc import channel
from tests.support.co import Co, capability
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.node import Node, Places
from tests.support.runtimes import fake_handler

Code = grpc.StatusCode


@pytest.mark.spec("D-4")
async def test_flag_is_never_sent_to_a_driver_that_does_not_advertise_deferral(
    places: Places,
) -> None:
    """`backend` is one word of a settings file: a plain driver there would mount on the host at every publish."""
    driver = fake_driver.FakeDriver(defers=False)
    async with nodes.running(places, driver=driver, backend=places.driver) as node, node.handler():
        target = places.target("one")
        await refused(
            node.co.publish("vol-1", target), Code.UNIMPLEMENTED, "DEFER_FS_OPS", "crust shim"
        )
        assert driver.called("NodePublishVolume") == []
        node.check_untouched(target)


async def test_driver_that_began_to_defer_on_the_same_connection_is_asked_again(
    places: Places,
) -> None:
    driver = fake_driver.FakeDriver(defers=False)
    async with nodes.running(places, driver=driver, backend=places.driver) as node, node.handler():
        target = places.target("one")
        await refused(node.co.publish("vol-1", target), Code.UNIMPLEMENTED, "DEFER_FS_OPS")
        driver.defers = True
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)


async def test_capability_is_asked_once_per_connection(kata: Node) -> None:
    for name in ("one", "two", "three"):
        await kata.co.publish(f"vol-{name}", kata.places.target(name))
    # once by the proxy, which the shim passes on, and once by the shim
    assert len(kata.driver.called("NodeGetCapabilities")) == 2


async def test_a_driver_that_was_downgraded_behind_its_socket_is_not_sent_the_flag(
    places: Places,
) -> None:
    """With a volume that a guest has written, the host's kernel would have parsed a hostile filesystem."""
    old, new = fake_driver.FakeDriver(), fake_driver.FakeDriver(defers=False)
    async with (
        app.running(places.settings(), targets=FakeTargets(places.kubelet), devices=FakeDevices()),
        nodes.shim(places),
        fake_handler.running(
            fake_handler.FakeHandler(),
            proxy_socket=places.sockets.handlers,
            endpoint=places.handler,
        ),
        channel.connect(places.csi) as connected,
    ):
        async with fake_driver.serving(old, places.driver):
            await Co(connected).publish("vol-1", places.target("one"))
        async with fake_driver.serving(new, places.driver):
            publish = Co(connected).publish("vol-2", places.target("two"), timeout_s=30)
            await refused(publish, Code.UNIMPLEMENTED, "DEFER_FS_OPS")
    assert new.called("NodePublishVolume") == []


async def test_a_driver_of_another_name_is_refused(kata: Node) -> None:
    kata.driver.name = "other.example.com"
    target = kata.places.target("one")
    await refused(
        kata.co.publish("vol-1", target),
        Code.FAILED_PRECONDITION,
        "'other.example.com'",
        "settings",
    )
    kata.check_untouched(target)


async def test_ids_of_512_bytes_are_deferred_asked_about_and_unpublished(kata: Node) -> None:
    """azuredisk's have up to 250; CSI says 128 and no CO checks."""
    target, volume_id = kata.places.target("one"), "/seg" * 128
    await kata.co.publish(volume_id, target)
    kata.check_published(volume_id, target)
    with kata.sandbox(target):
        assert (await kata.co.stats(volume_id, target)).usage
    await kata.co.unpublish(volume_id, target)
    kata.check_untouched(target)


async def test_a_long_error_text_of_the_driver_keeps_its_code(kata: Node) -> None:
    """The output of mkfs, say; with RESOURCE_EXHAUSTED a provisioner would schedule the pod elsewhere."""
    text = "mkfs: é" * 8000  # almost the 64 KiB that a peer may send
    kata.driver.failures["NodePublishVolume"] = Failure(Code.INTERNAL, text)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kata.co.publish("vol-1", kata.places.target("one"))
    assert caught.value.code() is Code.INTERNAL
    assert caught.value.details() == text


async def test_options_that_the_driver_does_not_repeat_reach_the_record(kata: Node) -> None:
    kata.driver.alter = lambda answer: answer.ClearField("mount_options")
    target = kata.places.target("one")
    given = capability(mount_flags=["nosuid,noexec", "dirsync", "_netdev"])
    await kata.co.publish("vol-1", target, given)
    assert kata.record(target).mount.mount_options == ("nosuid", "noexec", "dirsync")


async def test_readonly_among_the_options_is_kept(kata: Node) -> None:
    kata.driver.alter = lambda answer: answer.ClearField("mount_options")
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target, capability(mount_flags=["ro"]))
    assert kata.record(target).readonly


async def test_an_option_that_is_a_credential_is_refused_before_the_driver_is_asked(
    kata: Node,
) -> None:
    target = kata.places.target("one")
    given = capability(mount_flags=["password=hunter2"])
    await refused(kata.co.publish("vol-1", target, given), Code.INVALID_ARGUMENT, "credential")
    assert kata.driver.called("NodePublishVolume") == []
