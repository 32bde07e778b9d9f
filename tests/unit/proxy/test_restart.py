"""A restart of the proxy at any time: it scans the handoff directory and continues."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.handoff import store
from crust.handoff.record import Record
from crust.host.files import flocks
from crust.proxy import app
from crust.rpc import channel
from crust.rpc.serving import daemon
from crust.wire.v1 import inspect_pb2
from tests.support.co import Co
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.node import Places
from tests.support.records import records
from tests.support.runtimes import fake_handler

Code = grpc.StatusCode


@pytest.mark.spec("D-14")
async def test_restarted_proxy_needs_no_flag(places: Places, target: str) -> None:
    driver = fake_driver.FakeDriver()
    async with nodes.running(places, driver=driver) as node, node.handler():
        await node.co.publish("vol-1", target)
    with fake_handler.sandbox(places.volumes, target):
        async with nodes.running(places, driver=driver) as node, node.handler():
            assert (await node.co.stats("vol-1", target)).usage[0].total == 1000
            await node.co.expand("vol-1", target, 1)
            await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "sandbox-1")
    async with nodes.running(places, driver=driver) as node:
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


async def test_call_after_a_start_waits_for_its_handler(places: Places, target: str) -> None:
    async with nodes.running(places, grace_s=20) as node:
        publish = asyncio.create_task(
            node.co.publish("vol-1", target, timeout_s=20, volume_context=nodes.NAMED)
        )
        async with node.handler():
            await publish
            node.check_published("vol-1", target)


async def test_unnamed_publish_waits_for_all_handlers(places: Places, target: str) -> None:
    """gvisor is back, kata is still registering again: "the only one" is not to be believed yet."""
    async with (
        nodes.running(places, grace_s=20) as node,
        node.handler(name="gvisor", endpoint=f"{places.root}/g.sock"),
    ):
        publish = asyncio.create_task(node.co.publish("vol-1", target, timeout_s=20))
        async with node.handler(name="kata"):
            await refused(publish, Code.FAILED_PRECONDITION, "gvisor, kata")
        node.check_untouched(target)


async def test_unnamed_publish_after_the_grace_takes_the_only(places: Places, target: str) -> None:
    async with nodes.running(places, grace_s=0.3) as node, node.handler():
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)


async def test_call_fails_after_the_grace_period(places: Places, target: str) -> None:
    async with nodes.running(places, grace_s=0.05) as node:
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "none is registered"
        )


async def test_handler_registers_again_after_a_restart(places: Places) -> None:
    async with fake_driver.serving(fake_driver.FakeDriver(), places.driver), nodes.shim(places):
        fake = fake_handler.FakeHandler()
        async with _proxy(places):
            handler = fake_handler.running(
                fake, proxy_socket=places.sockets.handlers, endpoint=places.handler
            )
            session = await handler.__aenter__()
        try:
            await nodes.until(session.lost)
            async with _proxy(places, grace_s=20), channel.connect(places.csi) as connected:
                target = places.target("one")
                await Co(connected).publish(
                    "vol-1", target, timeout_s=20, volume_context=nodes.NAMED
                )
        finally:
            await handler.__aexit__(None, None, None)


async def test_a_second_proxy_is_refused_and_the_first_serves_on(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOCK_WAIT_S", 0)
    async with nodes.running(places) as node, node.handler():
        with pytest.raises(flocks.LockHeld, match=f"process {os.getpid()} holds it"):
            async with _proxy(places):
                raise AssertionError("two proxies")
        target = places.target("one")
        await node.co.publish("vol-1", target)


async def test_a_thousand_entries_are_there_after_a_restart(places: Places) -> None:
    directory = store.Store(places.volumes)
    os.mkdir(places.run)
    directory.open()
    for number in range(1000):
        target = f"{places.kubelet}/pods/{number}/mount"
        key = volumes.VolumeKey(volumes.DriverName(nodes.DRIVER), volumes.VolumeId(f"vol-{number}"))
        identity = volumes.DeviceIdentity(7, number, number + 1)
        record = records.a_record(target, source=volumes.BlockSource("/dev/loop0", identity))
        _plant(directory, replace(record, key=key))
    async with nodes.running(places) as node:
        answer = await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest())
        assert len(answer.volumes) == 1000
        target = places.target("999")
        await refused(node.co.publish("vol-999", target, defer=False), Code.ALREADY_EXISTS)


async def test_stop_waits_for_a_running_publish(places: Places, target: str) -> None:
    driver = fake_driver.FakeDriver()
    gate = driver.gates["NodePublishVolume"] = fake_driver.Gate()
    async with (
        fake_driver.serving(driver, places.driver),
        nodes.shim(places),
        channel.connect(places.csi) as connected,
    ):
        proxy = _proxy(places, grace_s=20)
        await proxy.__aenter__()
        handler = fake_handler.running(
            fake_handler.FakeHandler(),
            proxy_socket=places.sockets.handlers,
            endpoint=places.handler,
        )
        async with handler:
            publish = asyncio.create_task(
                Co(connected).publish("vol-1", target, volume_context=nodes.NAMED)
            )
            await nodes.until(gate.entered)
            stop = asyncio.create_task(proxy.__aexit__(None, None, None))
            await asyncio.wait([stop], timeout=0)
            gate.opened.set()
            await publish
            await stop
    entry = store.Store(places.volumes).read(volumes.TargetPath(target))
    assert entry is not None
    assert entry.require().key.volume_id == "vol-1"


def _plant(directory: store.Store, record: Record) -> None:
    """An entry without the fsyncs that a publish owes."""
    paths = directory.layout.entry(record.target)
    os.mkdir(paths.directory, 0o700)
    for path, data in ((paths.record, record.to_bytes()), (paths.claim_lock, b"")):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(data)


def _proxy(places: Places, *, grace_s: float = 0) -> Any:
    return app.running(
        places.settings(grace_s=grace_s), targets=FakeTargets(places.kubelet), devices=FakeDevices()
    )
