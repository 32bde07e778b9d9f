"""The five layers of docs/kata.md, each alone: the other four are switched off."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.handoff.record import Record
from crust.host.mounts import mount_api
from crust.kata import entry, gate, nri
from crust.kata.entry import Kind
from tests.integration.kata.conftest import KataNode, MakeDevice
from tests.support.kata import engine as engines
from tests.support.kata.engine import Engine, PluginRefused
from tests.support.kata.sandbox import StandInSandbox

pytestmark = pytest.mark.root

BEFORE_VALIDATION = {"version": "2.1.9", "nri_version": "", "events": (1 << 12) - 1}
"""An engine with NRI 0.8: without the event, and without a default validator."""


@asynccontextmanager
async def _plugged(node: KataNode, engine: Engine, bridge: nri.Gate) -> AsyncIterator[None]:
    path = f"{node.directory}/nri.sock"
    async with engines.serving(path, engine):
        plugin = asyncio.create_task(nri.serve(path, bridge, lambda: None))
        async with asyncio.timeout(30):
            await engine.registered.wait()
        try:
            yield
        finally:
            plugin.cancel()
            await asyncio.gather(plugin, return_exceptions=True)


def _unnamed(node: KataNode, record: Record) -> None:
    """No placeholder: Kata would share the host's directory."""
    node.entries.remove(entry.name_of(record.target.text))


def test_the_guard_takes_neither_data_nor_a_name(tmp_path: Path) -> None:
    target = str(tmp_path)
    mount_api.mount_guard(target, names=False)
    try:
        for write in (
            lambda: os.mkdir(f"{target}/d"),
            lambda: Path(f"{target}/f").write_bytes(b"x"),
            lambda: os.symlink("x", f"{target}/l"),
            lambda: os.mknod(f"{target}/n"),
        ):
            with pytest.raises(OSError, match="No space left") as refused:
                write()
            assert refused.value.errno == errno.ENOSPC
        assert os.listdir(target) == []
    finally:
        mount_api.unmount(target)


async def test_placeholder_names_no_device_while_all_of_crust_is_dead(
    node: KataNode, device: MakeDevice
) -> None:
    """Kata refuses a device that is not there: `make kata` shows it with the real one."""
    record = node.publish("a", device("a").path)
    document = json.loads(Path(node.entries.file(entry.name_of(record.target.text))).read_bytes())
    assert not os.path.lexists(document["device"])
    assert os.path.isabs(document["device"])


async def test_the_plugin_refuses_at_create_and_at_start(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    _unnamed(node, record)
    engine = Engine(**BEFORE_VALIDATION)  # type: ignore[arg-type]
    async with _plugged(node, engine, node.bridge()):
        app = engines.container((record.target.text, "/data"), pod_id=one.id)
        assert not engine.subscribed & 1 << 13
        with pytest.raises(PluginRefused, match="WrongRuntime"):
            await engine.create(engines.pod(one.id, handler="runc"), app)
        one.create_container(app.id, record.device, "/data")
        with pytest.raises(PluginRefused, match="VolumeNotClaimed"):
            await engine.start(engines.pod(one.id, pid=one.pid), app)
    assert node.claim(record) is None


class _DiesInCreate(gate.KataGate):
    """The process ends while it is asked."""

    on_create: Callable[[], Awaitable[None]]

    async def create(self, pod: nri.Pod, container: nri.Container, deadline_s: float) -> None:
        await self.on_create()


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "hangs"])
async def test_validation_refuses_for_plugin_that_dies_or_hangs_in_call(
    node: KataNode, device: MakeDevice, one: StandInSandbox, *, dies: bool
) -> None:
    record = node.publish("a", device("a").path)
    _unnamed(node, record)
    engine, bridge = Engine(timeout_s=0.3), node.bridge()
    never = asyncio.Event()

    async def ends() -> None:
        if dies:
            engine.disconnect()
        await never.wait()

    bridge.__class__ = _DiesInCreate
    bridge.on_create = ends  # type: ignore[attr-defined]
    async with _plugged(node, engine, bridge):
        app = engines.container((record.target.text, "/data"), pod_id=one.id)
        with pytest.raises(PluginRefused, match="validator plugin 99-crust failed"):
            await engine.create(engines.pod(one.id, pid=one.pid), app)
    assert node.claim(record) is None


async def test_a_required_plugin_refuses_while_the_bridge_is_away(
    node: KataNode, device: MakeDevice, one: StandInSandbox
) -> None:
    record = node.publish("a", device("a").path)
    _unnamed(node, record)
    app = engines.container((record.target.text, "/data"), pod_id=one.id)
    pod = engines.pod(one.id, pid=one.pid)
    await Engine().create(pod, app)  # without the setting nobody asks
    with pytest.raises(PluginRefused, match='required plugin "crust" not present'):
        await Engine(requires_plugin=True).create(pod, app)
    engine = Engine(requires_plugin=True)
    async with _plugged(node, engine, node.bridge()):
        await engine.create(pod, app)
    assert node.kind(record) is Kind.REAL
