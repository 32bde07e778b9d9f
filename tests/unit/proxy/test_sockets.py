"""The sockets of the drivers: a kubelet finds each by its registration."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from crust.proxy import proxy_process as proxy
from crust.proxy import sockets
from crust.proxy.settings import ProxySettings
from crust.rpc import channel
from crust.wire.pluginregistration.v1 import api_pb2, api_pb2_grpc
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

REGISTERED = "one.example.com"


@asynccontextmanager
async def running(places: Places, **changes: object) -> AsyncIterator[None]:
    """A proxy with one driver, whose table has `changes`, and a kubelet's directory of registrations."""
    served = {"name": REGISTERED, "socket": f"{places.root}/one.sock", "backend": places.driver}
    node = FakeNode(places)
    settings = ProxySettings.model_validate(
        node.proxy_settings().model_dump()
        | {"drivers": (served | changes,), "plugins_registry": f"{places.root}/registry"}
    )
    async with node.part("driver"), proxy.running(settings, host=node.host):
        yield


async def inspect(places: Places) -> tuple[list[str], list[str]]:
    """Names of the drivers with their registration, and the error names of the proxy's conditions."""
    async with channel.connect(places.sockets.inspect) as connected:
        stub: inspect_pb2_grpc.InspectAsyncStub = inspect_pb2_grpc.InspectStub(connected)
        drivers = (await stub.ListDrivers(inspect_pb2.ListDriversRequest())).drivers
        conditions = (await stub.GetHealth(inspect_pb2.GetHealthRequest())).conditions
    return (
        [f"{driver.name} {driver.registration}" for driver in drivers],
        [condition.error_name for condition in conditions],
    )


def made_ns(path: str) -> int:
    """When the socket was made; 0 while there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


async def test_refused_driver_gets_a_new_socket_until_it_is_registered(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet before 1.36 asks again for a new socket only."""
    monkeypatch.setattr(sockets, "_AGAIN_S", 0.0)
    path = f"{places.root}/registry/{REGISTERED}-reg.sock"

    async def answer(*, taken: bool) -> int:
        async with channel.connect(path) as connected:
            kubelet: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(connected)
            status = api_pb2.RegistrationStatus(plugin_registered=taken, error="no node id")
            number = made_ns(path)
            await kubelet.NotifyRegistrationStatus(status, timeout=10)
        return number

    async with running(places):
        for _ in range(2):
            before = await answer(taken=False)
            while made_ns(path) in (0, before):  # noqa: ASYNC110 - of a task
                await asyncio.sleep(0)
        last = await answer(taken=True)
        assert await inspect(places) == ([f"{REGISTERED} registered"], [])
        assert made_ns(path) == last


async def test_kubelet_finds_a_driver_and_may_refuse_it(places: Places) -> None:
    async with (
        running(places),
        channel.connect(f"{places.root}/registry/{REGISTERED}-reg.sock") as connected,
    ):
        kubelet: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(connected)
        info = await kubelet.GetInfo(api_pb2.InfoRequest(), timeout=10)
        assert info == api_pb2.PluginInfo(
            type="CSIPlugin",
            name=REGISTERED,
            endpoint=f"{places.root}/one.sock",
            supported_versions=["1.0.0"],
        )
        refused = api_pb2.RegistrationStatus(plugin_registered=False, error="no node id")
        await kubelet.NotifyRegistrationStatus(refused, timeout=10)
        assert await inspect(places) == ([f"{REGISTERED} refused"], ["RegistrationRefused"])
        taken = api_pb2.RegistrationStatus(plugin_registered=True)
        await kubelet.NotifyRegistrationStatus(taken, timeout=10)
        assert await inspect(places) == ([f"{REGISTERED} registered"], [])
    assert os.listdir(f"{places.root}/registry") == []


async def test_driver_that_others_register_has_no_registration_socket(places: Places) -> None:
    async with running(places, register_plugin=False):
        assert await inspect(places) == ([f"{REGISTERED} "], [])
        assert not os.path.exists(f"{places.root}/registry")
