"""Proxy, shim and driver as pods: with PID, mount and network namespaces of their own, by containerd and runc."""

import asyncio
from pathlib import Path

import grpc
import pytest

from crust.host.mounts import mount_api, mountinfo
from crust.rpc import channel
from tests.integration.containers.conftest import ANSWER_S, Pods, kubelet_of
from tests.support.containers import HOST_TO_CONTAINER
from tests.support.faults.refusals import refused
from tests.support.runtimes import fake_handler

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]  # each step has a limit of its own

CYCLES_S = 600.0


async def test_volume_is_mounted_on_the_host_from_create_to_delete(pods: Pods) -> None:
    await pods.start_all()
    async with kubelet_of(pods) as kubelet:
        volume_id, target = await kubelet.volume("plain"), pods.target("one")
        await kubelet.publish(volume_id, target, defer=False)
        mounted = mountinfo.at(target)
        assert mounted is not None
        assert mounted.fs_type == "ext4"
        Path(target, "file").write_text("hello")
        assert (await kubelet.co.stats(volume_id, target)).usage
        await kubelet.co.unpublish(volume_id, target)
        await kubelet.publish(volume_id, target, defer=False)
        assert Path(target, "file").read_text() == "hello"
        await kubelet.co.unpublish(volume_id, target)
        await kubelet.delete(volume_id)


async def test_volume_is_deferred_guarded_on_the_host_and_deleted(pods: Pods) -> None:
    await pods.start_all()
    async with kubelet_of(pods) as kubelet, pods.handler():
        volume_id, target = await kubelet.volume("deferred"), pods.target("one")
        await kubelet.publish(volume_id, target, defer=True)
        guard = mountinfo.at(target)
        assert guard is not None
        assert mount_api.is_guard(guard)
        entry = pods.entry(target)
        assert entry is not None
        assert entry.require().key.volume_id == volume_id
        with fake_handler.sandbox(f"{pods.run}/volumes", target):
            assert (await kubelet.co.stats(volume_id, target)).usage
            unpublish = kubelet.co.unpublish(volume_id, target)
            await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "sandbox-1")
        await kubelet.co.unpublish(volume_id, target)
        await kubelet.delete(volume_id)
        assert pods.entry(target) is None


async def test_proxy_that_was_killed_finds_what_is_deferred_and_its_claim(pods: Pods) -> None:
    await pods.start_all()
    async with kubelet_of(pods) as kubelet, pods.handler():
        volume_id, target = await kubelet.volume("deferred"), pods.target("one")
        await kubelet.publish(volume_id, target, defer=True)
        with fake_handler.sandbox(f"{pods.run}/volumes", target):
            await asyncio.to_thread(pods.running["proxy"].kill)
            guard = mountinfo.at(target)  # it was made in a namespace that is gone
            assert guard is not None
            assert mount_api.is_guard(guard)
            again = await asyncio.to_thread(pods.start, "proxy")
            await asyncio.to_thread(again.wait_for, "proxy serves")
            async with kubelet_of(pods) as second:
                assert (await second.co.stats(volume_id, target)).usage
                unpublish = second.co.unpublish(volume_id, target)
                await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "sandbox-1")
        async with kubelet_of(pods) as second:
            await second.co.unpublish(volume_id, target)
            await second.delete(volume_id)


async def test_second_proxy_is_refused_whatever_its_run_directory(pods: Pods) -> None:
    """Their processes do not see each other: both are process 1."""
    await pods.start_all()
    same = await asyncio.to_thread(pods.start, "proxy", name="same")
    await asyncio.to_thread(same.wait_ended)
    assert "LockHeld" in same.text()
    flags = (f"--run-dir={pods.run}/other", f"--volumes-root={pods.run}/other/volumes")
    other = await asyncio.to_thread(pods.start, "proxy", *flags, name="other")
    await asyncio.to_thread(other.wait_ended)
    assert "a process of another PID namespace (another container) already listens" in other.text()
    async with kubelet_of(pods) as kubelet:
        await kubelet.delete(await kubelet.volume("still-served"))


@pytest.mark.parametrize("program", ["proxy", "driver"])
@pytest.mark.parametrize("propagation", [HOST_TO_CONTAINER, "rprivate"])
async def test_start_is_refused_where_mounts_would_not_reach_the_host(
    pods: Pods, program: str, propagation: str
) -> None:
    started = await asyncio.to_thread(pods.start, program, kubelet=propagation)
    await asyncio.to_thread(started.wait_ended)
    assert "MountsNotPropagated" in started.text()
    assert "mountPropagation Bidirectional" in started.text()


class Callers:
    """A kubelet, which connects for each call, and a sidecar, which keeps its connection; with a pause of 5 ms."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._cycles = 0
        self._more = asyncio.Condition()

    async def kubelet(self, volume_id: str, target: str) -> None:
        while True:
            async with kubelet_of(self._pods) as each:
                await each.publish(volume_id, target, defer=True)
            async with kubelet_of(self._pods) as each:
                await each.co.unpublish(volume_id, target)
            await self._count()

    async def sidecar(self, volume_id: str, target: str) -> None:
        async with kubelet_of(self._pods) as each:
            while True:
                await each.publish(volume_id, target, defer=True)
                await each.co.unpublish(volume_id, target)
                await self._count()

    async def cycles(self, count: int) -> None:
        """Wait until so many more volumes were published and unpublished."""
        wanted = self._cycles + count
        async with asyncio.timeout(CYCLES_S), self._more:
            await self._more.wait_for(lambda: self._cycles >= wanted)

    async def _count(self) -> None:
        async with self._more:
            self._cycles += 1
            self._more.notify_all()
        await asyncio.sleep(0.005)


async def test_no_caller_sees_an_error_while_all_three_are_taken_over(pods: Pods) -> None:
    await pods.start_all()
    callers = Callers(pods)
    async with kubelet_of(pods) as kubelet, pods.handler():
        one, two = await kubelet.volume("one"), await kubelet.volume("two")
        targets = pods.target("one"), pods.target("two")
        async with asyncio.TaskGroup() as group:
            kubelets = group.create_task(callers.kubelet(one, targets[0]))
            sidecar = group.create_task(callers.sidecar(two, targets[1]))
            for program in ("proxy", "shim", "driver"):
                await asyncio.to_thread(_take_over, pods, program)
                await callers.cycles(10)
            sidecar.cancel()  # at a stop a call on an old connection may be lost (docs/operations.md)
            await asyncio.wait([sidecar])
            for program in ("proxy", "shim", "driver"):
                await asyncio.to_thread(pods.running[program].kill, "TERM")
                await callers.cycles(3)
            kubelets.cancel()
        async with kubelet_of(pods) as last:
            for volume_id, target in zip((one, two), targets, strict=True):
                await last.co.unpublish(volume_id, target)
                await last.delete(volume_id)


def _take_over(pods: Pods, program: str) -> None:
    successor = pods.start(program, "--take-over", name=f"{program}-2")
    successor.wait_for("took the state over")
    pods.running[program].wait_for("taken over; stop this")


async def test_registration_socket_names_the_hosts_path(pods: Pods) -> None:
    registry = pods.kubelet / "plugins_registry"
    registry.mkdir()
    started = await asyncio.to_thread(pods.start, "proxy", f"--plugins-registry={registry}")
    await asyncio.to_thread(started.wait_for, "proxy serves")
    async with channel.connect(f"{registry}/block.csi.crust.dev-reg.sock") as connected:
        get_info: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary(
            "/pluginregistration.Registration/GetInfo"
        )
        assert pods.csi.encode() in await get_info(b"", timeout=ANSWER_S)
