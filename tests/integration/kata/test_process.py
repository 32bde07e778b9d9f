"""The daemon as a whole: it registers what is fit, and serves a pod between stand-ins of engine and sandbox."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.kata import entry, nri, preflight, process
from crust.kata.entry import Kind
from crust.kata.settings import KataRuntime, KataSettings
from crust.wire.v1 import handlers_pb2
from crust_conformance.runtimes import testing
from tests.integration.kata.conftest import FIT, ONE, KataNode, end
from tests.support.kata import engine as engines
from tests.support.kata.engine import Engine, PluginRefused
from tests.support.kata.sandbox import StandInSandbox
from tests.support.raised import raised

pytestmark = pytest.mark.root

MakeDevice = Callable[[str], loop.LoopDevice]


def _settings(node: KataNode, *names: str) -> KataSettings:
    runtimes = tuple(
        KataRuntime(name=name, configuration=f"{node.directory}/{name}.toml") for name in names
    )
    return KataSettings(
        runtimes=runtimes,
        run_dir=str(node.directory),
        volumes_root=node.store.root,
        handlers_socket=f"{node.directory}/handlers.sock",
        nri_socket=f"{node.directory}/nri.sock",
        kata_volumes=node.entries.root,
        kata_sandboxes=str(node.sandboxes),
    )


@pytest.fixture
def settings(node: KataNode) -> KataSettings:
    (node.directory / "kata.toml").write_text(FIT)
    (node.directory / "shares.toml").write_text(FIT.replace("false", "true"))
    return _settings(node, "kata", "shares")


@asynccontextmanager
async def _node(
    node: KataNode, settings: KataSettings, engine: Engine
) -> AsyncIterator[testing.FakeProxy]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(testing.serving(str(node.directory)))
        await stack.enter_async_context(engines.serving(settings.nri_socket, engine))
        await stack.enter_async_context(process.running(settings))
        yield proxy


async def _placeholder(node: KataNode) -> None:
    async with asyncio.timeout(30):
        while not list(node.entries.ours()):  # noqa: ASYNC110 - another task's work on the disk
            await asyncio.sleep(0.01)


async def test_pod_gets_its_volume_in_one_way_only(
    node: KataNode, settings: KataSettings, device: MakeDevice, one: StandInSandbox
) -> None:
    engine = Engine()
    async with _node(node, settings, engine) as proxy:
        runtime = await proxy.registered("kata")
        assert runtime.features == preflight.FEATURES
        assert runtime.request.max_target_path_bytes == 189
        assert runtime.request.max_volumes_per_sandbox == 24
        assert set(proxy.runtimes) == {"kata"}  # the other would share the host's directory
        target, path = node.target("a").text, device("a").path
        os.makedirs(target)
        proxy.publish(path, target, handler="kata", guard=True)
        await _placeholder(node)
        pod, app = engines.pod(ONE, pid=one.pid), engines.container((target, "/data"), pod_id=ONE)
        with pytest.raises(PluginRefused, match="WrongRuntime"):
            await engine.create(engines.pod(ONE, handler="runc"), app)
        with pytest.raises(PluginRefused, match="VmUnknown"):
            await engine.create(engines.pod(ONE, pid=one.pid + 1), app)
        with pytest.raises(PluginRefused, match="VolumeNotClaimed"):
            await engine.start(pod, app)
        await engine.create(pod, app)
        assert path.encode() in Path(node.entries.file(entry.name_of(target))).read_bytes()
        one.create_container(app.id, path, "/data")
        await engine.start(pod, app)
        with raised("HeldBySandbox", match=ONE):
            proxy.unpublish(target)
        end(node, one)
        proxy.unpublish(target, guard=True)


async def test_a_plugin_that_lost_its_engine_comes_back(
    node: KataNode, settings: KataSettings
) -> None:
    engine = Engine()
    async with _node(node, settings, engine):
        for connections in (1, 2, 3):
            async with asyncio.timeout(30):
                await engine.registered.wait()
            assert engine.connections == connections
            engine.disconnect()


async def test_handler_names_what_is_wrong_now(node: KataNode, settings: KataSettings) -> None:
    engine = Engine()
    async with _node(node, settings, engine) as proxy:
        runtime, request = await proxy.registered("kata"), handlers_pb2.GetProblemsRequest()

        async def problems() -> list[str]:
            return list((await runtime.stub.GetProblems(request, timeout=30)).problems)

        (shares,) = await problems()
        assert shares.startswith("[KataUnfit]")
        assert "shares.toml" in shares
        (node.directory / "kata.toml").write_text(FIT.replace("false", "true"))
        before, now = await problems()
        assert before == shares
        assert "kata.toml" in now
        (node.directory / "kata.toml").write_text(FIT)
        assert await problems() == [shares]


async def test_without_a_fit_runtime_the_plugin_refuses_published_volumes(
    node: KataNode, settings: KataSettings, device: MakeDevice, one: StandInSandbox
) -> None:
    """An update of Kata has written its configuration anew, and the daemon was restarted."""
    record = node.publish("a", device("a").path)
    (node.directory / "kata.toml").write_text(FIT.replace("false", "true"))
    engine = Engine()
    async with _node(node, settings, engine) as proxy:
        app = engines.container((record.target.text, "/data"), pod_id=ONE)
        with pytest.raises(PluginRefused, match=r"KataUnfit.*disable_block_device_use"):
            await engine.create(engines.pod(ONE, pid=one.pid), app)
        assert proxy.runtimes == {}
    assert node.claim(record) is None


async def test_published_volume_of_unfit_runtime_gets_its_placeholder(
    node: KataNode, settings: KataSettings, device: MakeDevice
) -> None:
    record = node.publish("a", device("a").path)
    node.entries.remove(entry.name_of(record.target.text))
    (node.directory / "kata.toml").write_text(FIT.replace("false", "true"))
    async with _node(node, settings, Engine()):
        assert node.kind(record) is Kind.PLACEHOLDER


async def test_an_engine_with_another_mount_namespace_is_not_served(
    node: KataNode, settings: KataSettings, tmp_path: Path
) -> None:
    """A guard mount may not be there in it. The listener is a process of its own, which never answers."""
    ready = tmp_path / "ready"
    program = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "open(sys.argv[2], 'w').close(); time.sleep(1000)"
    )
    arguments = ("python3", "-c", program, settings.nri_socket, str(ready))
    engine = await asyncio.create_subprocess_exec("unshare", "--mount", *arguments)
    try:
        async with asyncio.timeout(30):
            while not ready.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        with raised("EngineInOtherNamespace", match="mount namespace"):
            await nri.serve(settings.nri_socket, node.bridge(), lambda: None)
    finally:
        engine.kill()
        await engine.wait()
