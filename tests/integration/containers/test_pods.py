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
    await asyncio.to_thread(same.wait_for, "waits for another process to end")
    assert "LockHeld" in same.text()
    flags = (f"--run-dir={pods.run}/other", f"--volumes-root={pods.run}/other/volumes")
    other = await asyncio.to_thread(pods.start, "proxy", *flags, name="other")
    refusal = "a process of another PID namespace (another container) already listens"
    await asyncio.to_thread(other.wait_for, refusal)
    await asyncio.to_thread(other.wait_ended)
    async with kubelet_of(pods) as kubelet:
        await kubelet.delete(await kubelet.volume("still-served"))
    await asyncio.to_thread(pods.running["proxy"].kill, "TERM")
    await asyncio.to_thread(same.wait_for, "proxy serves")
    async with kubelet_of(pods) as kubelet:
        await kubelet.delete(await kubelet.volume("served-by-the-successor"))


@pytest.mark.parametrize("program", ["proxy", "driver"])
@pytest.mark.parametrize("propagation", [HOST_TO_CONTAINER, "rprivate"])
async def test_start_is_refused_where_mounts_would_not_reach_the_host(
    pods: Pods, program: str, propagation: str
) -> None:
    started = await asyncio.to_thread(pods.start, program, kubelet=propagation)
    await asyncio.to_thread(started.wait_for, "mountPropagation Bidirectional")
    await asyncio.to_thread(started.wait_ended)
    assert "MountsNotPropagated" in started.text()


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
