"""The filesystem that the proxy makes for a handler whose guests make none."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.host.answers import NotSeen
from crust.host.filesystems.superblocks import Superblock
from crust.proxy import runtime_api
from crust.proxy.runtime_api import NOT_GROWN
from crust.rpc.messages import extensions
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB, Gate
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode
WANTED = volumes.GuestFormat(ext4_reserved_percent=1)


DEVICE = fake_driver.device_of("vol-1")
NO_GROW = ALL_FEATURES - {HandlerFeature.GROW}
GROWN = {"crust.dev/grow-in": "host"}


@pytest.fixture
async def empty(node: FakeNode) -> AsyncIterator[FakeNode]:
    """A node whose driver's volumes were created empty, and whose handler offers no FORMAT."""
    node.driver.format = WANTED
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.FORMAT}):
        yield node


@pytest.mark.spec("D-38", "D-16")
async def test_blank_volume_is_formatted_once_and_recorded_so(empty: FakeNode, target: str) -> None:
    await empty.co.publish("vol-1", target)
    assert empty.filesystems.made == {DEVICE: ("ext4", WANTED)}
    assert empty.record(target).mount.format is None
    before = empty.entry(target)
    await empty.co.publish("vol-1", target)
    assert empty.entry(target) == before
    assert empty.filesystems.looks == 1


@pytest.mark.spec("D-38")
async def test_handler_with_format_gets_the_blank_volume(kata: FakeNode, target: str) -> None:
    kata.driver.format = WANTED
    await kata.co.publish("vol-1", target)
    assert kata.record(target).mount.format == WANTED
    assert kata.filesystems.looks == 0


async def test_volume_that_nobody_calls_empty_is_not_looked_at(
    empty: FakeNode, target: str
) -> None:
    empty.driver.format = None
    await empty.co.publish("vol-1", target)
    assert empty.filesystems.looks == 0


@pytest.mark.spec("D-38")
async def test_blank_volume_that_is_to_be_read_only_is_refused(
    empty: FakeNode, target: str
) -> None:
    await refused(
        empty.co.publish("vol-1", target, readonly=True),
        Code.FAILED_PRECONDITION,
        "ReadOnlyVolumeNotFormatted",
    )
    assert empty.filesystems.made == {}
    empty.check_untouched(target)


async def test_reader_of_volume_whose_log_waits_is_refused(node: FakeNode, target: str) -> None:
    """Each guest would fail to mount it, and its pod would never start; a writer replays the log."""
    node.filesystems.unreplayed.add(DEVICE)
    async with node.handler():
        publish = node.co.publish("vol-1", target, readonly=True)
        await refused(publish, Code.FAILED_PRECONDITION, "LogNotReplayed")
        node.check_untouched(target)
        await node.co.publish("vol-1", target)
        await node.co.unpublish("vol-1", target)
        node.filesystems.unreplayed.clear()
        await node.co.publish("vol-1", target, readonly=True)


@pytest.mark.spec("D-26")
async def test_filesystem_smaller_than_its_device_is_published_and_named(
    node: FakeNode, target: str
) -> None:
    """Nobody grows it; a pod goes on with the old size, and the condition of its volume says so."""
    node.devices.sizes_bytes[DEVICE] = 64 * MIB
    node.filesystems.sizes_bytes[DEVICE] = 32 * MIB
    async with node.handler(features=NO_GROW):
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            condition = (await node.co.stats("vol-1", target)).volume_condition
            assert (condition.abnormal, condition.message) == (True, NOT_GROWN)
            node.filesystems.sizes_bytes[DEVICE] = 64 * MIB
            assert not (await node.co.stats("vol-1", target)).volume_condition.abnormal
        await node.co.unpublish("vol-1", target)


@pytest.mark.spec("D-26")
@pytest.mark.parametrize(
    ("features", "fields", "grows"),
    [
        (NO_GROW, {"volume_context": GROWN}, 1),
        (ALL_FEATURES, {"volume_context": GROWN}, 0),
        (NO_GROW, {}, 0),
        (NO_GROW, {"volume_context": GROWN, "readonly": True}, 0),
    ],
)
async def test_filesystem_grows_here_if_class_consents_and_guest_does_not(
    node: FakeNode,
    target: str,
    features: frozenset[HandlerFeature],
    fields: dict[str, Any],
    grows: int,
) -> None:
    async with node.handler(features=features):
        await node.co.publish("vol-1", target, **fields)
        await node.co.publish("vol-1", target, **fields)  # a sandbox may have it now
    assert node.filesystems.grown == [DEVICE] * grows
    (first, *_) = (call for call in node.driver.calls if call.method == "NodePublishVolume")
    is_told = extensions.requested(first.metadata, extensions.NOBODY_GROWS)
    is_asked = "volume_context" in fields or HandlerFeature.GROW in features
    assert is_told is not is_asked


async def test_device_that_cannot_be_read_takes_no_statistics_away(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs has one thread, however often a kubelet asks."""
    freed, looks = threading.Event(), []

    def hang(device: str, fs_type: str) -> Superblock:
        looks.append(device)
        freed.wait()
        raise NotSeen(f"cannot read {device}")

    monkeypatch.setattr(runtime_api, "_SUPERBLOCK_S", 0.05)
    monkeypatch.setattr(node.filesystems, "superblock", hang)
    async with node.handler(features=NO_GROW):
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            for _ in range(3):
                answer = await node.co.stats("vol-1", target)
                assert (len(answer.usage), answer.volume_condition.abnormal) == (2, False)
            assert len(looks) == 1
            freed.set()
            assert not (await node.co.stats("vol-1", target)).volume_condition.abnormal


async def test_device_is_reserved_while_its_filesystem_is_made(
    empty: FakeNode, target: str
) -> None:
    empty.filesystems.gate = Gate()
    first = asyncio.ensure_future(empty.co.publish("vol-1", target))
    await until(empty.filesystems.gate.entered)
    assert empty.entry(target) is None
    empty.driver.identities["vol-2"] = fake_driver.identity_of(DEVICE)
    other = empty.places.target("two")
    await refused(empty.co.publish("vol-2", other), Code.FAILED_PRECONDITION, "DeviceReserved")
    empty.driver.after["NodePublishVolume"] = lambda: empty.targets.host_mounts.update(
        {other: DEVICE}
    )
    on_host = empty.co.publish("vol-2", other, defer=False)
    await refused(on_host, Code.FAILED_PRECONDITION, "DeviceReserved")
    assert empty.filesystems.looks == 1
    empty.filesystems.gate.opened.set()
    await first
    empty.check_published("vol-1", target)


async def test_failed_mkfs_leaves_nothing(empty: FakeNode, target: str) -> None:
    empty.filesystems.error = errors.RuntimeFailed("mkfs.ext4 failed")
    with_lock = empty.co.publish("vol-1", target)
    await refused(with_lock, Code.UNAVAILABLE, "mkfs.ext4 failed")  # its lock is held
    empty.filesystems.left.pop().close()
    await empty.co.unpublish("vol-1", target)
    empty.check_untouched(target)


def _calls(node: FakeNode, target: str) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Every call that could give the device to somebody, or take it away."""
    return {
        "publish": lambda: node.co.publish("vol-1", target),
        "another": lambda: node.co.publish("vol-1", node.places.target("two")),
        "on the host": lambda: node.co.publish("vol-1", node.places.target("host"), defer=False),
        "unpublish": lambda: node.co.unpublish("vol-1", target),
        "unstage": lambda: node.co.unstage("vol-1", "/staging"),
    }


@pytest.mark.parametrize("call", ["publish", "another", "on the host", "unpublish", "unstage"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
async def test_volume_on_which_tool_runs_is_neither_given_nor_returned(
    places: Places, target: str, call: str, *, restarted: bool
) -> None:
    """mkfs does not end, and the proxy gives up or is started again: the lock alone says that it runs."""
    features = ALL_FEATURES - {HandlerFeature.FORMAT}
    async with FakeNode(places) as node, node.handler(features=features):
        node.driver.format = WANTED
        node.filesystems.error = errors.RuntimeFailed("mkfs.ext4 failed")
        await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE)
        (lock,) = node.filesystems.left
        if not restarted:
            asked = [call.method for call in node.driver.calls]
            await refused(_calls(node, target)[call](), Code.UNAVAILABLE)
            assert [call.method for call in node.driver.calls] == asked
    if restarted:
        async with (
            FakeNode(places, driver=node.driver) as node,
            node.handler(features=features),
        ):
            published = node.driver.published.copy()
            await refused(_calls(node, target)[call](), Code.UNAVAILABLE, "VolumeInUseByTool")
            assert node.driver.published == published
    lock.close()
    async with FakeNode(places, driver=node.driver) as node, node.handler(features=features):
        await node.co.publish("vol-1", target)
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)
