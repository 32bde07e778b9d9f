"""Ember-CSI, a public driver that is unmodified, between two shims: guests format, mount and grow its volumes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.node import HANDLER, Vendor
from tests.support import capabilities
from tests.support.nodes.whole_node import WholeNode, whole_node
from tests.support.third_party import ember

pytestmark = [
    pytest.mark.vm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
BYTES = csi_pb2.VolumeUsage.BYTES
EMBER = Vendor(ember.NAME, ember.__name__)
DEFERRED = {"crust.dev/defer": "always"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ember_node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    """A node with Ember and no other driver."""
    capabilities.need("ember")
    async with whole_node(EMBER) as node:
        node.kubelet.attaches = True
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(ember_node: WholeNode) -> AsyncIterator[WholeNode]:
    ember_node.kubelet.parameters = DEFERRED
    yield ember_node
    await ember_node.tidy()


async def test_volume_is_formatted_by_its_first_guest_kept_for_the_next_and_grown(
    node: WholeNode,
) -> None:
    volume = await node.volume(size_bytes=ember.MIN_BYTES)
    assert volume.volume_context["crust.dev/created-empty"] == "true"
    target = await node.publish(volume, defer=False)
    await node.output("one", target, "echo kept > /data/file; sync")
    assert not _host_mounts(node)
    await node.runtime.stop("one")
    await node.unpublish(volume, target)
    await node.kubelet.unstage(volume)

    await node.kubelet.stage(volume)
    again = await node.publish(volume, defer=False)
    assert await node.output("two", again, "cat /data/file") == "kept"
    before = (await node.kubelet.stats(volume, again))[BYTES]
    assert await node.kubelet.expand(volume, again, 2 * ember.MIN_BYTES) == 2 * ember.MIN_BYTES
    after = (await node.kubelet.stats(volume, again))[BYTES]
    assert after.total > 1.5 * before.total
    assert await node.output("two", again, "cat /data/file") == "kept"


async def test_repeated_call_of_a_kubelet_is_answered_as_the_first(node: WholeNode) -> None:
    volume = await node.volume(size_bytes=ember.MIN_BYTES)
    await node.kubelet.stage(volume)
    target = await node.publish(volume, defer=False)
    await node.kubelet.publish(volume, target, defer=False)
    await node.unpublish(volume, target)
    await node.kubelet.unpublish(volume, target)
    await node.kubelet.unstage(volume)
    await node.kubelet.unstage(volume)
    await node.kubelet.delete(volume)
    await node.kubelet.delete(volume)
    assert not list(Path(node.daemons.paths.base, "pool", "volumes").iterdir())
    node.volumes.remove(volume)


async def test_volume_that_says_nothing_is_mounted_on_the_host(node: WholeNode) -> None:
    node.kubelet.parameters = {}
    volume = await node.volume(size_bytes=ember.MIN_BYTES)
    target = await node.publish(volume, defer=False)
    assert not volume.volume_context
    Path(target, "file").write_text("on the host")
    assert _host_mounts(node)


async def test_volume_in_use_outlives_the_death_of_driver_shims_and_proxy(
    guest_image: object, acceleration: object
) -> None:
    capabilities.need("ember")
    async with whole_node(EMBER) as node:
        node.kubelet.attaches, node.kubelet.parameters = True, DEFERRED
        volume = await node.volume(size_bytes=ember.MIN_BYTES)
        target = await node.publish(volume, defer=False)
        await node.output("one", target, "echo kept > /data/file; sync")
        processes = ("driver", "controller", "shim", "proxy")
        for process in processes:
            await node.daemons.kill(process)
        for each in processes:
            await node.daemons.start(each)
        await node.kubelet.wait_ready(HANDLER)
        grown = await node.kubelet.expand(volume, target, 2 * ember.MIN_BYTES)
        assert grown == 2 * ember.MIN_BYTES
        assert (await node.kubelet.stats(volume, target))[BYTES].total > 1.5 * ember.MIN_BYTES
        assert await node.output("one", target, "cat /data/file") == "kept"
        await node.tidy()


def _host_mounts(node: WholeNode) -> list[str]:
    mounts = mountinfo.below(str(node.daemons.paths.kubelet))
    return [mount.target for mount in mounts if mount.fs_type == "ext4"]
