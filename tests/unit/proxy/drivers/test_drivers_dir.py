"""Drivers come and go by files, and are registered with a kubelet, while the others serve."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.handoff import watch
from crust.proxy import app
from crust.rpc import channel
from crust.settings.proxy import ProxySettings
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.pluginregistration.v1 import api_pb2, api_pb2_grpc
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc
from tests.support.drivers import fake_driver
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.node import Co, Places


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is made after the start, where only the next look finds it."""
    monkeypatch.setattr(watch, "RESCAN_S", 0.05)


@asynccontextmanager
async def running(places: Places, **changes: object) -> AsyncIterator[None]:
    settings = ProxySettings.model_validate(
        places.settings().model_dump()
        | {"drivers_dir": f"{places.root}/proxy.d", "plugins_registry": f"{places.root}/registry"}
        | changes
    )
    async with (
        fake_driver.serving(fake_driver.FakeDriver(), places.driver),
        app.running(settings, targets=FakeTargets(places.kubelet), devices=FakeDevices()),
    ):
        yield


def write(places: Places, name: str, text: str = "") -> Path:
    """A driver's file, which appears atomically."""
    directory = Path(places.root, "proxy.d")
    directory.mkdir(exist_ok=True)
    text = text or (
        f'name = "{name}"\nsocket = "{places.root}/{name}.sock"\nbackend = "{places.driver}"\n'
    )
    aside = directory / ".aside"
    aside.write_text(text)
    return aside.rename(directory / f"{name}.toml")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.02)


async def inspect(places: Places) -> tuple[list[str], list[str]]:
    """Names of the drivers with their registration, and the error names of the proxy's conditions."""
    async with channel.connect(places.sockets.inspect) as connected:
        stub: inspect_pb2_grpc.InspectAsyncStub = inspect_pb2_grpc.InspectStub(connected)
        drivers = (await stub.ListDrivers(inspect_pb2.ListDriversRequest())).drivers
        conditions = (await stub.GetHealth(inspect_pb2.GetHealthRequest())).conditions
    return (
        [f"{each.name} {each.registration}" for each in drivers],
        [each.error_name for each in conditions],
    )


async def call(socket: str) -> None:
    async with channel.connect(socket) as connected:
        await Co(connected).node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=10)


async def test_a_file_adds_a_driver_and_its_removal_removes_it(places: Places) -> None:
    socket = f"{places.root}/late.example.com.sock"
    async with running(places, drivers=()):
        assert await inspect(places) == ([], [])
        file = write(places, "late.example.com")
        await until(lambda: os.path.exists(socket))
        await call(socket)
        assert await inspect(places) == (["late.example.com waiting"], [])
        file.unlink()
        await until(lambda: not os.path.exists(socket))
        assert await inspect(places) == ([], [])


async def test_a_bad_file_is_reported_and_the_others_are_served(places: Places) -> None:
    write(places, "a.example.com", "name = [")
    write(places, "b.example.com", 'name = "b.example.com"\nsocket = "relative"\nbackend = "/x"\n')
    write(places, "c.example.com")
    taken = f'name = "{nodes.DRIVER}"\nsocket = "/tmp/x.sock"\nbackend = "/tmp/y.sock"\n'
    write(places, "d.example.com", taken)
    async with running(places):
        assert await inspect(places) == (
            ["c.example.com waiting", f"{nodes.DRIVER} waiting"],
            ["InvalidDriverFile"] * 3,
        )
        await call(f"{places.root}/c.example.com.sock")
        # what a file does wrong is no reason to restart the proxy
        async with channel.connect(f"{places.root}/c.example.com.sock") as connected:
            identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(connected)
            await identity.Probe(csi_pb2.ProbeRequest(), timeout=10)


async def test_a_changed_file_serves_its_driver_at_the_new_socket(places: Places) -> None:
    async with running(places, drivers=()):
        write(places, "one.example.com")
        await until(lambda: os.path.exists(f"{places.root}/one.example.com.sock"))
        moved = f"{places.root}/moved.sock"
        text = f'name = "one.example.com"\nsocket = "{moved}"\nbackend = "{places.driver}"\n'
        write(places, "one.example.com", text)
        await until(lambda: os.path.exists(moved))
        assert not os.path.exists(f"{places.root}/one.example.com.sock")
        await call(moved)


async def test_the_kubelet_finds_a_driver_registers_it_and_may_refuse_it(places: Places) -> None:
    write(places, "one.example.com")
    async with (
        running(places, drivers=()),
        channel.connect(f"{places.root}/registry/one.example.com-reg.sock") as connected,
    ):
        kubelet: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(connected)
        info = await kubelet.GetInfo(api_pb2.InfoRequest(), timeout=10)
        assert info == api_pb2.PluginInfo(
            type="CSIPlugin",
            name="one.example.com",
            endpoint=f"{places.root}/one.example.com.sock",
            supported_versions=["1.0.0"],
        )
        refused = api_pb2.RegistrationStatus(plugin_registered=False, error="no node id")
        await kubelet.NotifyRegistrationStatus(refused, timeout=10)
        assert await inspect(places) == (["one.example.com refused"], ["RegistrationRefused"])
        taken = api_pb2.RegistrationStatus(plugin_registered=True)
        await kubelet.NotifyRegistrationStatus(taken, timeout=10)
        assert await inspect(places) == (["one.example.com registered"], [])
    assert os.listdir(f"{places.root}/registry") == []


async def test_a_driver_that_others_register_has_no_registration_socket(places: Places) -> None:
    text = (
        f'name = "one.example.com"\nsocket = "{places.root}/one.sock"\nbackend = "/x.sock"\n'
        "register_plugin = false\n"
    )
    write(places, "one.example.com", text)
    async with running(places, drivers=()):
        assert await inspect(places) == (["one.example.com "], [])
        assert not os.path.exists(f"{places.root}/registry")
