"""The proxy on a real kernel: guard mounts, real devices, real claims."""

import asyncio
import errno
import gc
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust import volumes
from crust.host.block import devices as host_devices
from crust.host.block import loop, loop_devices
from crust.host.files import target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.proxy.deferrals import targets
from crust.runtime_handler import Resolved, claim_volume, resolve_source
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import inspect_pb2
from tests.support.drivers.fake_driver import MIB
from tests.support.faults.refusals import refused
from tests.support.kubelet import sub_paths
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Node, Places

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
def places() -> Iterator[Places]:
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield Places.make(root)


@pytest.fixture
def device(places: Places) -> Iterator[loop_devices.LoopDevice]:
    """A loop device with an ext4 on it."""
    image = f"{places.root}/volume.img"
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
    attached = loop.attach(image)
    yield attached
    loop.detach(attached)


@pytest.fixture
async def node(places: Places, device: loop_devices.LoopDevice) -> AsyncIterator[Node]:
    """A node whose driver defers with the loop device, on the kernel's own mounts and devices."""

    def real(answer: csi_pb2.DeferredMount) -> None:
        answer.block_device.path = device.path
        identity = host_devices.identify(device.path)
        answer.block_device.identity.major = identity.major
        answer.block_device.identity.minor = identity.minor
        answer.block_device.identity.disk_sequence = identity.disk_sequence

    guarded = targets.GuardedTargets([places.kubelet])
    async with nodes.running(places, targets=guarded, devices=host_devices) as running:
        running.driver.alter = real
        async with running.handler():
            yield running


@pytest.mark.spec("D-15")
async def test_guarded_target_refuses_writes_and_is_removed_by_unpublish(node: Node) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    node.check_published("vol-1", target)
    with pytest.raises(OSError, match="No space") as caught:
        await asyncio.to_thread(Path(f"{target}/data").write_text, "lost")
    assert caught.value.errno == errno.ENOSPC
    os.chown(target, 0, 4711)  # as a kubelet does
    await node.co.publish("vol-1", target)
    assert len([each for each in mountinfo.read_all() if each.target == target]) == 1
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)
    assert mountinfo.below(node.places.kubelet) == ()


@pytest.mark.spec("H-33")
@pytest.mark.parametrize("sub_path", ["data", "logs/pod-1/2026"])  # subPath; subPathExpr, expanded
async def test_sub_path_that_a_kubelet_prepares_leads_to_the_volume(
    node: Node, sub_path: str
) -> None:
    """kubelet_pods.go looks for the directory on the host, creates it in the target, and binds it."""
    target = node.places.target("one")
    bound = f"{node.places.kubelet}/pods/one/volume-subpaths/pv-1/c/0"
    await node.co.publish("vol-1", target)
    await asyncio.to_thread(sub_paths.prepare, target, sub_path, bound)
    try:
        found = resolve_source(node.places.volumes, bound)
        assert isinstance(found, Resolved)
        assert (found.record.key.volume_id, found.sub_path) == ("vol-1", sub_path)
        with pytest.raises(OSError, match="No space"):
            await asyncio.to_thread(Path(f"{bound}/f").write_text, "lost")
    finally:
        sub_paths.clean(bound)
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unpublish_removes_empty_directories_that_were_made_while_the_guard_was_lost(
    node: Node,
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    mount_api.unmount(target)
    os.makedirs(f"{target}/a/b")
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unpublish_keeps_a_file_that_was_written_while_the_guard_was_lost(node: Node) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    mount_api.unmount(target)
    os.makedirs(f"{target}/a/b")
    await asyncio.to_thread(Path(f"{target}/a/f").write_text, "kept")
    with pytest.raises(grpc.aio.AioRpcError, match="not empty"):
        await node.co.unpublish("vol-1", target)
    assert await asyncio.to_thread(Path(f"{target}/a/f").read_text) == "kept"
    os.unlink(f"{target}/a/f")
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unmounted_guard_is_restored_over_what_was_written_below_it(node: Node) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    watch: Any = node.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()
    mount_api.unmount(target)
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


def test_own_guard_is_known_again_without_the_list_of_mounts(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = volumes.TargetPath(places.target("one"))
    here = targets.GuardedTargets([places.kubelet])
    assert here.mount_guard(target)
    with monkeypatch.context() as blind:
        blind.setattr(mountinfo, "read_all", None)
        blind.setattr(mountinfo, "at", None)
        assert here.has_guard(target)
        here.check_free(target)
    assert targets.GuardedTargets([places.kubelet]).has_guard(
        target
    )  # after a restart: by the list
    here.unmount_guard(target)
    assert not here.has_guard(target)
    assert not os.path.lexists(target.text)


def test_a_guard_that_was_prepared_is_the_next_target_s_alone_and_is_known_again(
    places: Places,
) -> None:
    one, two = (volumes.TargetPath(places.target(name)) for name in ("one", "two"))
    here = targets.GuardedTargets([places.kubelet])
    before = len(os.listdir("/proc/self/fd"))
    here.prepare_guard()
    here.prepare_guard()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert here.mount_guard(one)
    assert len(os.listdir("/proc/self/fd")) == before
    assert here.mount_guard(two)
    with pytest.raises(OSError, match="No space"):
        Path(f"{one}/data").write_text("lost")
    os.mkdir(f"{one}/name")
    assert not os.path.exists(f"{two}/name")
    assert here.has_guard(one)
    assert not here.mount_guard(one)
    for each in (one, two):
        here.unmount_guard(each)


def test_a_prepared_guard_goes_with_its_owner_and_a_refused_target_keeps_none(
    places: Places,
) -> None:
    target = volumes.TargetPath(places.target("one"))
    Path(target.text).parent.mkdir(parents=True, exist_ok=True)
    Path(target.text).symlink_to(places.root)
    here = targets.GuardedTargets([places.kubelet])
    before = len(os.listdir("/proc/self/fd"))
    here.prepare_guard()
    with pytest.raises(target_paths.SymlinkInPath):
        here.mount_guard(target)
    del here
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before  # the watch of its mounts has gone, too


def test_a_target_is_known_to_have_no_guard_unless_one_was_found_or_mounted_there(
    places: Places,
) -> None:
    one, two, three = (volumes.TargetPath(places.target(name)) for name in ("one", "two", "three"))
    earlier = targets.GuardedTargets([places.kubelet])
    earlier.mount_guard(one)
    here = targets.GuardedTargets([places.kubelet])
    assert not here.is_known_unguarded(
        three
    )  # before it has listed what earlier processes have left
    assert set(here.guards()) == {one.text}
    here.mount_guard(two)
    assert not here.is_known_unguarded(one)
    assert not here.is_known_unguarded(two)
    assert here.is_known_unguarded(three)
    os.makedirs(three.text)
    mount_api.bind(places.root, three.text)  # as a driver does
    assert here.is_known_unguarded(three)
    mount_api.unmount_one(three.text)
    here.unmount_guard(one)
    here.unmount_guard(two)
    assert here.is_known_unguarded(two)


def test_a_link_to_a_guard_is_not_known_to_be_none(places: Places) -> None:
    target = volumes.TargetPath(places.target("one"))
    here = targets.GuardedTargets([places.kubelet])
    assert not here.guards()
    here.mount_guard(target)
    try:
        link = Path(places.kubelet, "link")
        link.symlink_to(os.path.dirname(target.text))
        through = volumes.TargetPath(f"{link}/{os.path.basename(target.text)}")
        assert here.has_guard(through)
        assert not here.is_known_unguarded(through)
        elsewhere = Path(places.root, "alias")
        elsewhere.symlink_to(places.kubelet)
        aliased = targets.GuardedTargets([str(elsewhere)])
        aliased.guards()
        of_alias = target.text.replace(places.kubelet, str(elsewhere), 1)
        assert aliased.has_guard(volumes.TargetPath(of_alias))
        assert not aliased.is_known_unguarded(volumes.TargetPath(of_alias))
    finally:
        here.unmount_guard(target)


@pytest.mark.parametrize("beside", ["over the guard", "in its place"])
def test_another_mount_is_never_treated_as_the_former_guard(places: Places, beside: str) -> None:
    target = volumes.TargetPath(places.target("one"))
    here = targets.GuardedTargets([places.kubelet])
    here.mount_guard(target)
    if beside == "in its place":
        mount_api.unmount(target.text)
    mount_api.bind(places.root, target.text)
    try:
        assert not here.has_guard(target)
        for act in (here.check_free, here.mount_guard, here.unmount_guard):
            with pytest.raises(targets.TargetMounted):
                act(target)
    finally:
        mount_api.unmount_one(target.text)
        here.unmount_guard(target)


def test_unmount_by_the_parents_descriptor_follows_no_link_that_took_its_place(
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


async def test_a_target_with_a_mount_on_it_is_refused_and_keeps_it(node: Node) -> None:
    target = node.places.target("one")
    os.mkdir(target)
    await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "mine", target], check=True)
    try:
        await refused(
            node.co.publish("vol-1", target), Code.UNAVAILABLE, "mine (tmpfs)", "unpublish"
        )
        assert node.driver.calls == []
        assert node.entry(target) is None
    finally:
        mount_api.unmount(target)


@pytest.mark.spec("D-21")
async def test_a_device_that_the_host_has_mounted_is_refused_naming_where(
    node: Node, device: loop_devices.LoopDevice
) -> None:
    target, where = node.places.target("one"), f"{node.places.root}/elsewhere"
    os.mkdir(where)
    mount_api.mount_device(device.path, where, "ext4")
    try:
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, device.path, where
        )
        node.check_untouched(target)
    finally:
        mount_api.unmount(where)
    await node.co.publish("vol-1", target)
    await node.co.unpublish("vol-1", target)


@pytest.mark.spec("D-19")
async def test_sdk_claim_blocks_host_mounts_and_unpublish(
    node: Node, device: loop_devices.LoopDevice
) -> None:
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    claim = claim_volume(
        node.places.volumes,
        volumes.TargetPath(target),
        volumes.SandboxId("box-7"),
        volumes.HandlerName("kata"),
        features=frozenset(volumes.HandlerFeature),
    )
    with claim:
        await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "box-7")
        await refused(node.co.expand("vol-1", target, 65 * MIB), Code.UNAVAILABLE, "bytes")
        node.driver.size_bytes.clear()  # it only said that the device grew
        assert (await node.co.expand("vol-1", target, 64 * MIB)).capacity_bytes == 64 * MIB
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_target_in_use_as_working_directory_is_reported_and_removed_later(node: Node) -> None:
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


async def test_retry_after_run_was_lost_finds_the_guard_mount(node: Node) -> None:
    """After a crash that removed the entry, the guard is still mounted on the target, and the publish is repeated."""
    target = node.places.target("one")
    await node.co.publish("vol-1", target)
    entry = node.entry(target)
    assert entry is not None
    for name in os.listdir(entry.directory):
        os.unlink(f"{entry.directory}/{name}")
    os.rmdir(entry.directory)
    await node.co.publish("vol-1", target)
    node.check_published("vol-1", target)
    assert len([each for each in mountinfo.read_all() if each.target == target]) == 1
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)
