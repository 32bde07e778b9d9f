"""What operators are shown: drivers, handlers, volumes, and events."""

import asyncio
import datetime
import os
from pathlib import Path
from typing import Any

import grpc

from crust.core import volumes
from crust.handoff import claims, layout
from crust.wire.v1 import inspect_pb2
from tests.support.co import capability
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode

Code = grpc.StatusCode


async def test_operators_see_drivers_handlers_and_volumes(kata: FakeNode, published: str) -> None:
    (driver,) = (await kata.inspect.ListDrivers(inspect_pb2.ListDriversRequest())).drivers
    assert (driver.name, driver.connected, driver.deferred_volumes) == ("csi.example.com", True, 1)
    (handler,) = (await kata.inspect.ListHandlers(inspect_pb2.ListHandlersRequest())).handlers
    assert handler.registration.name == "kata"
    volume = await _listed(kata)
    assert (volume.volume_id, volume.state, volume.sandbox_id) == ("vol-1", "published", "")
    with kata.sandbox(published, name="box-7"):
        volume = await _listed(kata)
        assert (volume.state, volume.sandbox_id) == ("mounted", "box-7")


async def _listed(node: FakeNode) -> inspect_pb2.DeferredVolume:
    """The one deferred volume, after a look."""
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await node.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    return volume


async def test_error_of_the_last_claim_stays_visible(kata: FakeNode, published: str) -> None:
    """When an operator looks at a pod that does not start, its sandbox has ended already."""
    parsed = volumes.TargetPath.parse(published)
    paths = layout.Layout(kata.places.volumes).entry(parsed)
    with claims.ClaimLock.acquire(paths, parsed):
        claims.write(
            paths,
            claims.Claim(
                sandbox_id="box-7",
                handler="kata",
                state=claims.State.ERROR,
                error="the guest cannot mount it",
                pid=os.getpid(),
                claimed_at=datetime.datetime.now(datetime.UTC),
                live=True,
            ),
        )
    volume = await _listed(kata)
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message == "the guest cannot mount it"


async def test_claim_that_a_killed_sandbox_left_is_called_so(
    kata: FakeNode, published: str
) -> None:
    with kata.sandbox(published, name="box-7"):
        claim = Path(layout.Layout(kata.places.volumes).entry(volumes.TargetPath(published)).claim)
        left = claim.read_bytes()
    claim.write_bytes(left)
    volume = await _listed(kata)
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message.startswith("sandbox box-7 ended and left its claim")


async def test_unreadable_entry_is_shown_with_its_reason(node: FakeNode) -> None:
    entry = Path(node.places.volumes, "a" * 64)
    entry.mkdir(0o700)
    (entry / "mountInfo.json").write_text("{}")
    volume = await _listed(node)
    assert volume.state == "unreadable"
    assert "cannot be read" in volume.message


async def test_watch_reports_the_events_of_a_volume(kata: FakeNode, target: str) -> None:
    watch: Any = kata.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()  # the watch has begun
    await kata.co.publish("vol-1", target)
    assert (await _next(watch, "published")).target_path == target
    with kata.sandbox(target, name="box-7"):
        assert "box-7" in (await _next(watch, "claimed")).message
        await kata.freeze(target, 5)
        frozen = await _next(watch, "frozen")
        assert (frozen.target_path, frozen.message) == (target, "for 5 s at most")
        await kata.thaw(target)
        assert (await _next(watch, "thawed")).target_path == target
        await kata.limit(target, volumes.IoLimits(read_iops=1))
        assert "read_iops=1" in (await _next(watch, "limits-set")).message
    await _next(watch, "released")
    await kata.co.unpublish("vol-1", target)
    assert (await _next(watch, "unpublished")).handler == "kata"
    refusal = kata.co.publish("vol-1", target, capability("btrfs"))
    await refused(refusal, Code.FAILED_PRECONDITION)
    assert "btrfs" in (await _next(watch, "refused")).message
    watch.cancel()


async def _next(watch: Any, kind: str) -> inspect_pb2.Event:
    """The next event of a kind; a claim causes two events, taken and mounted."""
    async with asyncio.timeout(60):
        while True:
            event: inspect_pb2.Event = await watch.read()
            if event.kind == kind:
                return event
