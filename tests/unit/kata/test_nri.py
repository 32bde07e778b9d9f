"""The plugin against containerd's side: what it subscribes to, and that whatever goes wrong refuses the container."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crust.core import errors
from crust.kata import nri, ttrpc
from crust.wire.nri.v1alpha1 import nri_pb2
from tests.support.kata import engine as engines
from tests.support.kata.engine import Engine, PluginGone, PluginRefused

Work = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    return


class Gate:
    """Records what it is asked, and does what a test wants."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on_create: Work = _nothing
        self.on_synchronize: Work = _nothing
        self.on_end: Work = _nothing
        self.deadline_s = 0.0
        self.containers: list[nri.Container] = []

    async def create(self, pod: nri.Pod, container: nri.Container, deadline_s: float) -> None:
        self.asked.append(f"create {container.id} in {pod.id}")
        self.deadline_s = deadline_s
        await self.on_create()

    async def start(self, pod: nri.Pod, container: nri.Container, deadline_s: float) -> None:
        self.asked.append(f"start {container.id}")
        await self.on_create()

    async def ended(self, container: nri.Container) -> None:
        self.asked.append(f"ended {container.id}")
        await self.on_end()

    async def synchronize(self, pods: dict[str, nri.Pod], containers: list[nri.Container]) -> None:
        self.containers = containers
        await self.on_synchronize()


@asynccontextmanager
async def _plugged(engine: Engine, gate: Gate) -> AsyncIterator[asyncio.Task[None]]:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/nri.sock"
        async with engines.serving(path, engine):
            plugin = asyncio.create_task(nri.serve(path, gate, lambda: None))
            registered = asyncio.create_task(engine.registered.wait())
            await asyncio.wait([plugin, registered], return_when=asyncio.FIRST_COMPLETED)
            registered.cancel()
            try:
                yield plugin
            finally:
                plugin.cancel()
                await asyncio.gather(plugin, return_exceptions=True)


async def test_plugin_subscribes_to_create_start_end_and_validation() -> None:
    engine = Engine()
    async with _plugged(engine, Gate()):
        assert engine.subscribed == sum(1 << (number - 1) for number in (4, 6, 10, 11, 14))


@pytest.mark.parametrize(
    ("version", "knows"),
    [("1.7.33", False), ("2.1.9", False), ("v2.2.0", True), ("2.10.0", True), ("devel", False)],
)
async def test_engine_before_nri_0_12_gets_events_that_it_knows(
    version: str, *, knows: bool
) -> None:
    events = (1 << 14) - 1 if knows else (1 << 13) - 1
    engine = Engine(version=version, nri_version="", events=events)
    async with _plugged(engine, Gate()):
        assert bool(engine.subscribed & 1 << 13) is knows


@pytest.mark.parametrize("nri_version", ["v0.12.3", ""])
async def test_each_step_of_a_container_reaches_the_gate(nri_version: str) -> None:
    engine, gate = Engine(nri_version=nri_version, version="2.2.9"), Gate()
    async with _plugged(engine, gate):
        pod, container = engines.pod(), engines.container(("/a", "/b"))
        await engine.create(pod, container)
        await engine.start(pod, container)
        await engine.stop(pod, container)
    assert gate.asked == [
        "create container-0001 in sandbox-0001",
        "create container-0001 in sandbox-0001",  # its validation
        "start container-0001",
        "ended container-0001",
    ]


async def test_end_of_a_container_is_answered_while_its_work_hangs() -> None:
    """It can refuse nothing, and the engine would drop the plugin."""
    engine, gate, goes_on = Engine(), Gate(), asyncio.Event()

    async def hang() -> None:
        await goes_on.wait()

    gate.on_end = hang
    async with _plugged(engine, gate):
        pod, container = engines.pod(), engines.container(("/a", "/b"))
        await engine.create(pod, container)
        await engine.stop(pod, container)
        await engine.create(pod, container)
        assert gate.asked.count("ended container-0001") == 1
        goes_on.set()


async def test_an_error_refuses_and_its_text_reaches_the_engine() -> None:
    engine, gate = Engine(), Gate()

    async def refused() -> None:
        raise errors.NotReady.named("VolumeHeld", "the volume is in use", hint="x" * 9000)

    gate.on_create = refused
    async with _plugged(engine, gate):
        with pytest.raises(PluginRefused, match=r"crust: \[VolumeHeld\] the volume is in use"):
            await engine.create(engines.pod(), engines.container())
        assert engine.registered.is_set()


async def test_an_exception_that_nobody_expected_refuses() -> None:
    engine, gate = Engine(), Gate()

    async def failed() -> None:
        raise ZeroDivisionError

    gate.on_create = failed
    async with _plugged(engine, gate):
        for call in (engine.create, engine.start):
            with pytest.raises(PluginRefused, match="UnexpectedError"):
                await call(engines.pod(), engines.container())


async def test_the_gate_has_four_fifths_of_the_engines_time() -> None:
    engine, gate = Engine(timeout_s=10), Gate()
    async with _plugged(engine, gate):
        before_s = time.monotonic()
        await engine.create(engines.pod(), engines.container())
    assert before_s < gate.deadline_s <= time.monotonic() + 8


async def test_a_plugin_that_hangs_in_create_refuses_by_the_validation() -> None:
    engine, gate = Engine(timeout_s=0.2), Gate()
    hangs = asyncio.Event()

    async def hang() -> None:
        await hangs.wait()

    gate.on_create = hang
    async with _plugged(engine, gate):
        with pytest.raises(PluginRefused):
            await engine.create(engines.pod(), engines.container())


async def test_synchronize_is_answered_before_anything_is_looked_at() -> None:
    engine, gate = Engine(containers=[engines.container(state=1)]), Gate()
    looked = asyncio.Event()
    gate.on_synchronize = lambda: _wait(looked)
    async with _plugged(engine, gate):
        await engine.create(engines.pod(), engines.container())
        looked.set()
    assert [container.is_created for container in gate.containers] == [True]


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_method_that_it_does_not_have_is_unimplemented() -> None:
    engine = Engine()
    async with _plugged(engine, Gate()):
        with pytest.raises(PluginRefused, match="does not serve 'UpdateContainer'"):
            await engine.call("UpdateContainer", b"")
        with pytest.raises(PluginRefused, match="does not serve"):
            await engine.call("CreateContainer", b"", service="another.Service")


async def test_an_engine_that_is_away_is_named() -> None:
    with pytest.raises(errors.PeerUnavailable, match=r"NRI socket /nowhere/nri\.sock"):
        await nri.serve("/nowhere/nri.sock", Gate(), lambda: None)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["CreateContainer", "StartContainer", "StateChange"]), st.binary(max_size=80)
)
def test_bytes_that_are_no_message_never_pass_without_the_gate(method: str, payload: bytes) -> None:
    """A create that is answered OK has asked the gate, whatever its bytes; an event of no concern does nothing."""

    async def run() -> None:
        engine, gate = Engine(), Gate()
        async with _plugged(engine, gate):
            with contextlib.suppress(PluginRefused, PluginGone):
                await engine.call(method, payload)
                assert gate.asked or method == "StateChange"

    asyncio.run(run())


@given(st.binary(min_size=1, max_size=400))
def test_an_engine_that_sends_garbage_ends_the_connection(data: bytes) -> None:
    async def run() -> None:
        async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            writer.close()

        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/nri.sock"
            server = await asyncio.start_unix_server(garbage, path)
            async with server, asyncio.timeout(20):
                with contextlib.suppress(ttrpc.ProtocolViolated, errors.PeerUnavailable):
                    await nri.serve(path, Gate(), lambda: None)

    asyncio.run(run())


def test_only_the_source_of_a_bind_is_a_path() -> None:
    mounts = [
        nri_pb2.Mount(source="/pods/a/mount", destination="/a", type="bind"),
        nri_pb2.Mount(source="/pods/b/mount", destination="/b", options=["rbind", "ro"]),
        nri_pb2.Mount(source="tmpfs", destination="/dev", type="tmpfs", options=["nosuid"]),
        nri_pb2.Mount(source="proc", destination="/proc", type="proc"),
    ]
    container = nri.container_of(nri_pb2.Container(id="c", mounts=mounts))
    sources = ("/pods/a/mount", "/pods/b/mount")
    assert tuple(mount.source for mount in container.mounts) == sources
