"""The proxy on a real kernel: guard mounts, real devices, real claims."""

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.host.block import loop
from crust.host.files import sealed, target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls
from crust.proxy import guard
from crust.proxy.target import Guard, MountStack, TargetState
from crust.runtime_handler.blocking import Resolved, claim_volume, resolve_source
from crust.wire.v1 import inspect_pb2
from tests.support.drivers.fake_driver import MIB, Failure
from tests.support.faults.refusals import refused
from tests.support.kubelet import sub_paths
from tests.support.measures.looks import counted
from tests.support.nodes.fake_node import FakeNode, node_on
from tests.support.nodes.places import Places
from tests.support.raised import raised

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
async def node(places: Places, ext4_device: loop.LoopDevice) -> AsyncIterator[FakeNode]:
    """A node whose driver defers with the loop device, on the kernel's own mounts and devices."""
    async with node_on(ext4_device.path, places) as running, running.handler():
        yield running


async def test_host_publish_at_an_overlong_path_reaches_the_driver(node: FakeNode) -> None:
    target = f"{node.places.kubelet}/{'x' * 300}"
    node.driver.failures["NodePublishVolume"] = Failure(Code.INVALID_ARGUMENT, "too long")
    await refused(node.co.publish("vol-1", target, defer=False), Code.INVALID_ARGUMENT, "too long")


@pytest.mark.spec("D-15")
async def test_guarded_target_refuses_writes_and_is_removed_by_unpublish(node: FakeNode) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    node.check_published("vol-1", target)
    with pytest.raises(OSError, match="No space") as caught:
        await asyncio.to_thread(Path(f"{target}/data").write_text, "lost")
    assert caught.value.errno == errno.ENOSPC
    os.chown(target, 0, 4711)  # as a kubelet does
    await node.co.publish("vol-1", target)
    assert len([mount for mount in mountinfo.read_all() if mount.target == target]) == 1
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)
    assert mountinfo.below(node.places.kubelet) == ()


@pytest.mark.spec("H-33")
@pytest.mark.parametrize("sub_path", ["data", "logs/pod-1/2026"])  # subPath; subPathExpr, expanded
async def test_sub_path_that_a_kubelet_prepares_leads_to_the_volume(
    node: FakeNode, sub_path: str
) -> None:
    """kubelet_pods.go looks for the directory on the host, creates it in the target, and binds it."""
    target = node.places.target("one")
    bound = f"{node.places.kubelet}/pods/one/volume-subpaths/pv-1/c/0"
    await node.co.publish("vol-1", target)
    await asyncio.to_thread(sub_paths.prepare, target, sub_path, bound)
    try:
        resolved = resolve_source(node.places.volumes, bound)
        assert isinstance(resolved, Resolved)
        assert (resolved.record.key.volume_id, resolved.sub_path) == ("vol-1", sub_path)
        with pytest.raises(OSError, match="No space"):
            await asyncio.to_thread(Path(f"{bound}/f").write_text, "lost")
    finally:
        sub_paths.clean(bound)
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unpublish_removes_empty_directories_made_while_guard_was_lost(
    node: FakeNode,
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    mount_api.unmount(target)
    sealed.unseal(target, "it")  # as on a filesystem without the attribute
    os.makedirs(f"{target}/a/b")
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unpublish_keeps_file_that_was_written_while_guard_was_lost(node: FakeNode) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    mount_api.unmount(target)
    sealed.unseal(target, "it")  # as on a filesystem without the attribute
    os.makedirs(f"{target}/a/b")
    await asyncio.to_thread(Path(f"{target}/a/f").write_text, "kept")
    with pytest.raises(grpc.aio.AioRpcError, match="not empty"):
        await node.co.unpublish("vol-1", target)
    assert await asyncio.to_thread(Path(f"{target}/a/f").read_text) == "kept"
    os.unlink(f"{target}/a/f")
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unmounted_guard_is_restored_over_what_was_written_below_it(node: FakeNode) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    watch: Any = node.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()
    mount_api.unmount(target)
    sealed.unseal(target, "it")  # as on a filesystem without the attribute
    await asyncio.to_thread(Path(f"{target}/f").write_text, "kept")
    while (await watch.read()).kind != "guard-restored":
        pass
    watch.cancel()
    with pytest.raises(OSError, match="No space"):
        await asyncio.to_thread(Path(f"{target}/g").write_text, "lost")
    with pytest.raises(grpc.aio.AioRpcError, match="not empty"):
        await node.co.unpublish("vol-1", target)
    os.unlink(f"{target}/f")
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_bind_of_a_directory_above_takes_nothing_below_the_guard(
    node: FakeNode, tmp_path: Path
) -> None:
    """As a hostPath of a pod in a virtual machine, whose share has no mounts of the host in it."""
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    mount_api.bind(node.places.kubelet, str(tmp_path))
    below = tmp_path / Path(target).relative_to(node.places.kubelet)
    try:
        assert not mountinfo.stacked_at(str(below))
        for write in (below.joinpath("f").touch, below.joinpath("d").mkdir, below.rmdir):
            with pytest.raises(PermissionError):
                write()
    finally:
        mount_api.unmount(str(tmp_path))
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_refused_unpublish_leaves_the_directory_below_sealed(node: FakeNode) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    node.driver.failures["NodeUnpublishVolume"] = Failure(Code.INTERNAL, "not now")
    await refused(node.co.unpublish("vol-1", target), Code.INTERNAL, "not now")
    mount_api.unmount(target)
    with pytest.raises(PermissionError):
        os.rmdir(target)
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_start_after_a_reboot_lets_a_kubelet_remove_targets(
    places: Places, ext4_device: loop.LoopDevice
) -> None:
    """A reboot takes guard and entry away, and the kubelet may have forgotten the pod."""
    here, volume = guard.Targets([places.kubelet]), "volumes/kubernetes.io~csi/pv"
    one, two = (
        volumes.TargetPath(f"{places.kubelet}/pods/{uid}/{volume}/mount") for uid in ("one", "two")
    )
    for target in (one, two):
        os.makedirs(os.path.dirname(target.text))
        here.mount_guard(target, names=False)
    mount_api.unmount(one.text)
    with pytest.raises(PermissionError):
        os.rmdir(one.text)
    here.unseal(two)  # as an unpublish that was killed
    async with node_on(ext4_device.path, places):
        os.rmdir(one.text)
        assert here.look(two).stack is MountStack.GUARD
    mount_api.unmount(two.text)
    with pytest.raises(PermissionError):
        os.rmdir(two.text)
    here.unseal_all()
    os.rmdir(two.text)


async def test_target_that_stays_sealed_stops_no_start(
    places: Places, ext4_device: loop.LoopDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        f"{places.kubelet}/pods/{uid}/volumes/kubernetes.io~csi/pv/mount" for uid in ("a", "b")
    ]
    for path in paths:
        os.makedirs(path)
        sealed.seal(path, "it")
    unseal = sealed.unseal

    def deny(path: str, shown: object) -> bool:
        if str(shown) == paths[0]:
            raise syscalls.DeniedByKernel(f"{shown}")
        return unseal(path, shown)

    with monkeypatch.context() as patched:
        patched.setattr(sealed, "unseal", deny)
        async with node_on(ext4_device.path, places):
            os.rmdir(paths[1])
    assert sealed.unseal(paths[0], "it")


def test_guard_of_another_mount_keeps_its_seal(places: Places) -> None:
    target, here = volumes.TargetPath(places.target("one")), guard.Targets([places.kubelet])
    here.mount_guard(target, names=False)
    mount_api.bind(places.root, target.text)
    with raised("TargetMounted"):
        here.unmount_guard(target)
    mount_api.unmount_one(target.text)
    mount_api.unmount_one(target.text)
    with pytest.raises(PermissionError):
        os.rmdir(target.text)
    here.unmount_guard(target)
    assert not os.path.lexists(target.text)


def test_guard_without_the_right_to_seal_is_restored_and_reported(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: str, shown: object) -> bool:
        raise syscalls.DeniedByKernel(f"{shown}")

    target, here = volumes.TargetPath(places.target("one")), guard.Targets([places.kubelet])
    monkeypatch.setattr(sealed, "seal", deny)
    with pytest.raises(syscalls.DeniedByKernel):
        here.mount_guard(target, names=False)
    with pytest.raises(syscalls.DeniedByKernel):
        here.restore_guard(target, None)
    assert here.look(target).stack is MountStack.GUARD
    here.unmount_guard(target)


def test_guard_seen_after_restart_is_not_mounted_again(places: Places) -> None:
    target = volumes.TargetPath(places.target("one"))
    guard.Targets([places.kubelet]).mount_guard(target, names=True)
    here = guard.Targets([places.kubelet])
    assert here.look(target).stack is MountStack.GUARD
    here.mount_guard(target, names=True)
    here.restore_guard(target, Guard(7, names=False))
    assert len(mountinfo.stacked_at(target.text)) == 1
    assert here.guard_at(target) == Guard(0, names=True)
    here.unmount_guard(target)
    assert here.look(target) == TargetState()
    assert here.guard_at(target) is None
    assert not os.path.lexists(target.text)


def test_guard_of_attempt_for_handler_with_other_features_is_replaced(places: Places) -> None:
    target = volumes.TargetPath(places.target("one"))
    here = guard.Targets([places.kubelet])
    for names in (True, False, True):
        here.mount_guard(target, names=names)
        assert here.guard_at(target) == Guard(0, names=names)
        assert len(mountinfo.stacked_at(target.text)) == 1
    here.unmount_guard(target)


@pytest.mark.parametrize("seen", [Guard(4711, names=True), Guard(4711, names=False), None])
def test_restored_guard_is_as_it_was_seen_from_first_moment(
    places: Places, seen: Guard | None
) -> None:
    target = volumes.TargetPath(places.target("one"))
    here = guard.Targets([places.kubelet])
    here.restore_guard(target, seen)
    assert here.guard_at(target) == (seen or Guard(0, names=False))
    with pytest.raises(OSError, match="No space"):
        Path(f"{target}/data").write_text("lost")
    here.unmount_guard(target)


def test_refused_target_keeps_no_descriptor(places: Places) -> None:
    target = volumes.TargetPath(places.target("one"))
    Path(target.text).symlink_to(places.root)
    here = guard.Targets([places.kubelet])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(target_paths.SymlinkInPath):
        here.mount_guard(target, names=False)
    with pytest.raises(target_paths.SymlinkInPath):
        here.restore_guard(target, None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_mounts_are_listed_as_a_co_spells_their_targets(places: Places) -> None:
    """The root of a kubelet may be a link."""
    one, two = (volumes.TargetPath(places.target(name)) for name in ("one", "two"))
    here = guard.Targets([places.kubelet])
    elsewhere = Path(places.root, "alias")
    elsewhere.symlink_to(places.kubelet)
    aliased = guard.Targets([str(elsewhere)])
    here.mount_guard(one, names=False)
    os.makedirs(two.text)
    mount_api.bind(places.root, two.text)
    try:
        assert here.stacks() == {one.text: MountStack.GUARD, two.text: MountStack.FOREIGN}
        mount_api.bind(places.root, one.text)
        assert here.stacks()[one.text] is MountStack.BURIED
        mount_api.unmount_one(one.text)
        of_alias = one.text.replace(places.kubelet, str(elsewhere), 1)
        assert aliased.stacks()[of_alias] is MountStack.GUARD
        assert aliased.look(volumes.TargetPath(of_alias)).stack is MountStack.GUARD
    finally:
        mount_api.unmount(two.text)
        here.unmount_guard(one)


@pytest.mark.parametrize("beside", ["over the guard", "in its place"])
def test_another_mount_is_never_treated_as_the_former_guard(places: Places, beside: str) -> None:
    target = volumes.TargetPath(places.target("one"))
    targets = guard.Targets([places.kubelet])
    targets.mount_guard(target, names=False)
    if beside == "in its place":
        mount_api.unmount(target.text)
    mount_api.bind(places.root, target.text)
    try:
        wanted = MountStack.BURIED if beside == "over the guard" else MountStack.FOREIGN
        assert targets.look(target).stack is wanted
        for act in (
            lambda guarded: targets.mount_guard(guarded, names=False),
            targets.unmount_guard,
            lambda guarded: targets.restore_guard(guarded, None),
        ):
            with raised("TargetMounted"):
                act(target)
    finally:
        mount_api.unmount_one(target.text)
        targets.unmount_guard(target)


async def test_link_to_a_guard_does_not_reach_the_driver(node: FakeNode) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    link = f"{node.places.kubelet}/link"
    os.symlink(os.path.dirname(target), link)
    with pytest.raises(grpc.aio.AioRpcError, match="a link leads"):
        await node.co.unpublish("vol-1", f"{link}/mount")
    assert node.driver.called("NodeUnpublishVolume") == []
    node.check_published("vol-1", target)
    await node.co.unpublish("vol-1", target)


def test_unmount_by_parents_descriptor_follows_no_link(
    places: Places,
) -> None:
    """A directory above the target is exchanged after it was opened: what is mounted behind the link stays."""
    ours, other = (Path(places.kubelet, name) for name in ("ours", "other"))
    for directory in (ours, other):
        (directory / "mount").mkdir(parents=True)
        mount_api.mount_guard(f"{directory}/mount")
    parent = os.open(ours, os.O_PATH | os.O_DIRECTORY)
    moved = f"{ours}.moved"
    try:
        ours.rename(moved)
        ours.symlink_to(other)
        assert mount_api.unmount_one(f"{ours}/mount", parent=parent)
        assert mountinfo.at(f"{other}/mount") is not None
        assert mountinfo.at(f"{moved}/mount") is None
    finally:
        os.close(parent)
        mount_api.unmount(f"{moved}/mount")
        mount_api.unmount(f"{other}/mount")


async def test_target_with_mount_on_it_is_refused_and_keeps_it(node: FakeNode) -> None:
    target = node.places.target("one")
    os.mkdir(target)
    await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "mine", target], check=True)
    try:
        await refused(
            node.co.publish("vol-1", target), Code.UNAVAILABLE, "mine (tmpfs)", "unpublish"
        )
        assert node.driver.called("NodePublishVolume") == []
        assert node.entry(target) is None
    finally:
        mount_api.unmount(target)


@pytest.mark.spec("D-21")
async def test_device_that_host_has_mounted_is_refused_naming_where(
    node: FakeNode, ext4_device: loop.LoopDevice
) -> None:
    target, where = node.places.target("one"), f"{node.places.root}/elsewhere"
    os.mkdir(where)
    mount_api.mount_device(ext4_device.path, where, "ext4")
    try:
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, ext4_device.path, where
        )
        node.check_untouched(target)
    finally:
        mount_api.unmount(where)
    await node.co.publish("vol-1", target)
    await node.co.unpublish("vol-1", target)


def test_device_of_a_mount_is_found_by_its_target(
    places: Places, ext4_device: loop.LoopDevice
) -> None:
    guarded, where = guard.Targets([places.kubelet]), f"{places.root}/mounted"
    os.mkdir(where)
    assert guarded.mounted_device(where) is None
    mount_api.mount_device(ext4_device.path, where, "ext4")
    assert guarded.mounted_device(where) == ext4_device.path
    mount_api.unmount(where)


@pytest.mark.spec("D-21")
async def test_device_that_a_process_writes_is_refused_naming_the_process(
    node: FakeNode, ext4_device: loop.LoopDevice
) -> None:
    """A hypervisor whose runtime has died: it has no claim any more, and opened the device plainly."""
    target = node.places.target("one")
    with open(ext4_device.path, "r+b", buffering=0):
        named = f"[{os.getpid()}] by fd"
        await refused(node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, named)
        node.check_untouched(target)
    await node.co.publish("vol-1", target)
    # a retry changes nothing that a guest may have
    with open(ext4_device.path, "r+b", buffering=0):
        await node.co.publish("vol-1", target)
    await node.co.unpublish("vol-1", target)


@pytest.mark.spec("D-19")
async def test_sdk_claim_blocks_host_mounts_and_unpublish(
    node: FakeNode, ext4_device: loop.LoopDevice
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    with node.sandbox(target, "box-7"):
        await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "box-7")
        await refused(node.co.expand("vol-1", target, 65 * MIB), Code.UNAVAILABLE, "bytes")
        node.driver.state.volumes.clear()  # it only said that the device grew
        assert (await node.co.expand("vol-1", target, 64 * MIB)).capacity_bytes == 64 * MIB
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_publish_claim_and_unpublish_look_at_all_processes_once(
    node: FakeNode, ext4_device: loop.LoopDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = counted(monkeypatch)
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    assert len(looks) == 1
    await node.co.publish("vol-1", target)  # the same device again
    assert len(looks) == 1
    parsed, sandbox = volumes.TargetPath.parse(target), volumes.SandboxId("box-1")
    claim = await asyncio.to_thread(
        claim_volume, node.places.volumes, parsed, sandbox, volumes.HandlerName("kata")
    )
    assert len(looks) == 2
    await asyncio.to_thread(claim.release)
    await node.co.unpublish("vol-1", target)
    assert len(looks) == 3


async def test_target_used_as_working_directory_is_reported_and_removed_later(
    node: FakeNode,
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    process = await asyncio.create_subprocess_exec("sleep", "60", cwd=target)
    try:
        await refused(
            node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, str(process.pid)
        )
    finally:
        process.kill()
        await process.wait()
    assert node.entry(target) is not None
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)
