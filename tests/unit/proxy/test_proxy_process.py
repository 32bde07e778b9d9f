"""`crust proxy` as a process: start, refusal, stop, kill; a new one scans the handoff directory and continues."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.core import volumes
from crust.host.process import systemd
from crust.rpc import channel
from tests.support.co import NAMED
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused, repeated, until, until_probe
from tests.support.nodes import proxy_process
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.hanging_targets import HangingTargets, running
from tests.support.nodes.places import Places
from tests.support.nodes.started_programs import output, start, until_logged
from tests.support.runtimes import fake_handler


def flags(places: Places, **changes: str) -> list[str]:
    given = {
        "run-dir": places.run,
        "volumes-root": places.volumes,
        "target-root": places.kubelet,
        "driver": f"{DRIVER},{places.csi},{places.shim}",
    }
    options = [f"--{name}={value}" for name, value in {**given, **changes}.items()]
    return ["proxy", "--no-check-propagation", *options]


@asynccontextmanager
async def proxy(places: Places) -> AsyncIterator[Process]:
    """A proxy that serves; killed at the end if it still runs."""
    process = await start(*flags(places))
    try:
        await until_logged(process, b"proxy serves")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.spec("H-13")
async def test_second_proxy_on_one_handoff_directory_is_refused(places: Places) -> None:
    """Two vendors' DaemonSets: each has a run directory and a socket of its own, and both write one directory."""
    socket, run_dir = f"{places.root}/other.sock", f"{places.root}/other"
    driver = f"other.example.com,{socket},{places.shim}"
    async with proxy(places) as first:
        second = await start(*flags(places, **{"run-dir": run_dir, "driver": driver}))
        text = await output(second)
        assert second.returncode == 1
        assert f"{places.volumes}/.writer.lock is locked" in text
        assert str(first.pid) in text
        assert not os.path.exists(socket)


async def test_second_proxy_names_first_and_serves_after_it(places: Places) -> None:
    async with proxy(places) as first:
        second = await start(*flags(places))
        try:
            line = await until_logged(second, b"waits for another process")
            assert f"process {first.pid} holds it" in line
            assert Path(places.csi).is_socket()
            first.send_signal(signal.SIGTERM)
            text = await output(first)
            assert (first.returncode, "stopped" in text) == (0, True), text
            await until_logged(second, b"proxy serves")
            assert Path(places.csi).is_socket()
        finally:
            second.kill()
            await second.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["proxy"], "drivers"),
        (["proxy", "--driver=just-a-name"], "NAME,SOCKET,BACKEND"),
    ],
)
async def test_invalid_settings_exit_with_2(arguments: list[str], words: str) -> None:
    process = await start(*arguments)
    text = await output(process)
    assert process.returncode == 2
    assert words in text
    assert "Traceback" not in text


async def test_sockets_are_accessible_to_the_owner_only(places: Places) -> None:
    """Sockets 0600 in a directory 0700: only root may connect."""
    async with proxy(places):
        assert Path(places.run).stat().st_mode & 0o777 == 0o700
        served = {path for path in Path(places.root).rglob("*") if path.is_socket()}
        sockets = places.sockets
        named = {places.csi, sockets.runtime, sockets.handlers, sockets.inspect}
        assert named <= set(map(str, served))
        assert {path for path in served if path.stat().st_mode & 0o777 != 0o600} == set()
        async with channel.connect(places.sockets.inspect) as connected:
            async with asyncio.timeout(60):
                await connected.channel_ready()


async def test_run_directory_that_others_may_list_shows_names_alone(places: Places) -> None:
    """A kubelet makes the hostPath of a pod 0755."""
    run = Path(places.run)
    run.mkdir(mode=0o755, exist_ok=True)
    run.chmod(0o755)
    async with proxy(places):
        modes = {path: path.stat().st_mode & 0o777 for path in run.iterdir()}
    assert {path for path, mode in modes.items() if mode & 0o077} == set()
    assert {"volumes", "handlers.sock", "proxy.lock"} <= {path.name for path in modes}


Code = grpc.StatusCode


@pytest.mark.spec("D-14")
async def test_restarted_proxy_needs_no_flag(places: Places, target: str) -> None:
    driver = fake_driver.FakeDriver()
    async with FakeNode(places, driver=driver) as node, node.handler():
        await node.co.publish("vol-1", target)
    with fake_handler.sandbox(places.volumes, target):
        async with FakeNode(places, driver=driver) as node, node.handler():
            assert (await node.co.stats("vol-1", target)).usage[0].total == 1000
            await node.co.expand("vol-1", target, 1)
            await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "sandbox-1")
    async with FakeNode(places, driver=driver) as node:
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


POINTS_AT_MOST = 60


@pytest.fixture
async def peers(places: Places) -> AsyncIterator[FakeNode]:
    """The parts that survive the proxy, a handler that registers with each proxy, and the CO that retries."""
    os.mkdir(places.run, 0o700)
    parts = ("driver", "shim", "calls")
    async with FakeNode(places, parts=parts) as node, node.handler(waits=False):
        yield node


async def _answered(peers: FakeNode, call: str, target: str) -> bool:
    """Make a call; False if the proxy was not there, or not any more. What it refuses is raised.

    ABORTED is repeated, as a CO does: after a start the proxy may be restoring the guard mount at the target.
    """
    try:
        await repeated(lambda: _request(peers, call, target), Code.ABORTED)
    except grpc.aio.AioRpcError as error:
        if error.code() is not Code.UNAVAILABLE:
            raise
        return False
    return True


async def _request(peers: FakeNode, call: str, target: str) -> object:
    if call == "publish":
        return await peers.co.publish("vol-1", target, timeout_s=20, volume_context=NAMED)
    return await peers.co.unpublish("vol-1", target, timeout_s=20)


async def _again(peers: FakeNode, call: str, target: str) -> None:
    """Repeat a call until it is answered, as a CO does."""
    await repeated(lambda: _request(peers, call, target), Code.ABORTED, Code.UNAVAILABLE)


async def _survives(peers: FakeNode, call: str, target: str, number: int) -> bool:
    """Whether a proxy that dies at change `number` answered the call."""
    async with proxy_process.running(peers.places, die_at=number) as proxy:
        if await _answered(peers, call, target):
            return True
        assert await proxy.ended() == -signal.SIGKILL
        return False


@pytest.mark.parametrize("then", ["publish", "unpublish"])
@pytest.mark.spec("D-23")
async def test_publish_killed_anywhere_is_finished_or_undone_next(
    peers: FakeNode, then: str
) -> None:
    target = peers.places.target("one")
    for number in range(POINTS_AT_MOST):
        if await _survives(peers, "publish", target, number):
            break
        async with proxy_process.running(peers.places):
            if then == "publish":
                await _again(peers, "publish", target)
                peers.check_published("vol-1", target)
            await _again(peers, "unpublish", target)
            peers.check_untouched(target)
    else:
        raise AssertionError("the publish has no end")
    assert number >= 6, "the seam saw too few changes to prove anything"


@pytest.mark.spec("D-23")
@pytest.mark.parametrize("is_new", [False, True], ids=["the same kubelet", "a restarted kubelet"])
async def test_unpublish_killed_anywhere_leaves_what_the_kubelet_can_finish(
    peers: FakeNode, *, is_new: bool
) -> None:
    """The kubelet restarts before the proxy does: then only a mount point is a volume to it."""
    target, targets = peers.places.target("one"), peers.targets
    forgotten = 0
    for number in range(POINTS_AT_MOST):
        async with proxy_process.running(peers.places):
            await _again(peers, "publish", target)
            peers.check_published("vol-1", target)
        if await _survives(peers, "unpublish", target, number):
            break
        is_mounted = targets.has_guard(volumes.TargetPath(target))
        async with proxy_process.running(peers.places):
            if is_mounted or not is_new:
                await _again(peers, "unpublish", target)
            peers.check_untouched(target)
        forgotten += not is_mounted
    else:
        raise AssertionError("the unpublish has no end")
    assert number >= 5, "the seam saw too few changes to prove anything"
    assert forgotten >= 3, "no kill came after the guard was unmounted"


@pytest.mark.parametrize("call", ["publish", "unpublish"])
async def test_proxy_killed_while_driver_works_leaves_a_repeatable_call(
    peers: FakeNode, call: str
) -> None:
    target = peers.places.target("one")
    method = "NodePublishVolume" if call == "publish" else "NodeUnpublishVolume"
    async with proxy_process.running(peers.places) as proxy:
        if call == "unpublish":
            await _again(peers, "publish", target)
        gate = peers.driver.gates[method] = fake_driver.Gate()
        asked = asyncio.create_task(_request(peers, call, target))
        await until(gate.entered)
        await proxy.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
    gate.opened.set()
    del peers.driver.gates[method]
    async with proxy_process.running(peers.places):
        await _again(peers, call, target)
        if call == "publish":
            peers.check_published("vol-1", target)
            await _again(peers, "unpublish", target)
        peers.check_untouched(target)


async def test_proxy_tells_the_watchdog_of_its_process(
    places: Places, targets: HangingTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with running(places, targets) as node:
        await until_probe(node.co.channel, Code.OK)
    assert b"WATCHDOG=1" in sent
