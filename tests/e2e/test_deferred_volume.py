"""Deferred volumes on a whole node: real processes, and the volume mounted in a microVM's kernel.

One node for the file; each test has volumes and sandboxes of its own.
"""

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest

from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import capability
from examples.kata.runtime import messages
from examples.kata.runtime.client import RuntimeRefused
from tests.support.faults.refusals import refused
from tests.support.kubelet import sub_paths
from tests.support.nodes.whole_node import MIB, WholeNode

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]

BYTES = csi_pb2.VolumeUsage.BYTES


async def test_containers_of_a_sandbox_share_vm_and_volume_mount(node: WholeNode) -> None:
    target = await node.publish(await node.volume())
    await node.output("one", target, "echo first > /data/said")
    pid = await node.qemu_pid("one")
    outputs = await asyncio.gather(
        *(node.output("one", target, "cat /data/said; stat -c %d /data") for _ in range(3))
    )
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("first")
    assert [sandbox["sandbox"] for sandbox in await node.runtime.list()] == ["one"]
    assert await node.qemu_pid("one") == pid


@pytest.mark.parametrize("fs_type", ["ext4", "xfs", "btrfs"])
async def test_volume_is_read_by_next_guest_and_host(node: WholeNode, fs_type: str) -> None:
    """Expanded online by the first guest."""
    wanted, size = capability(fs_type), 320 * MIB
    volume = await node.volume(size_bytes=size, capability=wanted)
    target = await node.publish(volume, capability=wanted)
    assert fs_type in await node.output("one", target, "grep ' /data ' /proc/mounts")
    before = await node.kubelet.stats(volume, target)
    assert await node.kubelet.expand(volume, target, 2 * size) == 2 * size
    after = await node.kubelet.stats(volume, target)
    assert after[BYTES].total - before[BYTES].total > 280 * MIB
    summed = await node.output(
        "one", target, "dd if=/dev/urandom of=/data/f bs=1M count=8 2>/dev/null; md5sum < /data/f"
    )
    await node.runtime.stop("one")
    assert await node.output("two", target, "md5sum < /data/f") == summed
    await node.runtime.stop("two")
    await node.kubelet.unpublish(volume, target)
    on_host = await node.publish(volume, capability=wanted, defer=False)
    assert hashlib.md5((on_host / "f").read_bytes()).hexdigest() == summed.split()[0]


@pytest.mark.parametrize("policy", ["Always", "OnRootMismatch"])
async def test_fs_group_is_applied_in_the_guest(node: WholeNode, policy: str) -> None:
    """OnRootMismatch leaves the files of a volume whose root is right already; Always does not."""
    plain = await node.volume()
    wanted = capability("ext4", "4059", policy)
    first = await node.publish(plain)
    await node.output("one", first, "mkdir /data/d; echo x > /data/d/f; ln -s /bin /data/trap")
    await node.runtime.stop("one")
    await node.kubelet.unpublish(plain, first)

    target = await node.publish(plain, capability=wanted)
    owners = await node.output("two", target, "stat -c '%g %a' /data/d /data/d/f; stat -c %g /bin/")
    directory, file, trapped = owners.splitlines()
    assert directory.split() == ["4059", "2775"]
    assert file.split() == ["4059", "664"]
    assert trapped == "0", "a symbolic link of the volume led out of it"
    await node.output("two", target, "chgrp 0 /data/d/f")
    await node.runtime.stop("two")

    group = await node.output("three", target, "stat -c %g /data/d/f")
    assert group == ("4059" if policy == "Always" else "0")


async def test_undeferred_mount_source_is_refused(node: WholeNode, tmp_path: Path) -> None:
    with pytest.raises(RuntimeRefused, match="not a deferred volume"):
        await node.run("one", tmp_path, "true")


GROUP = capability("ext4", "100", "OnRootMismatch")


async def in_pod(node: WholeNode, sources: dict[str, Path], script: str) -> str:
    """The output of a container of the pod's sandbox, with each source at its destination."""
    mounts = tuple(
        messages.Mount(source=str(source), destination=destination, readonly=False)
        for destination, source in sources.items()
    )
    argv = ("/bin/sh", "-ec", script)
    ended = await node.runtime.run(messages.Run(sandbox="pod", argv=argv, mounts=mounts, keep=True))
    assert ended.code == 0, ended
    return ended.stdout.decode().strip()


@pytest.mark.story(1)
async def test_story_1_everything_is_deferred_for_pod_with_two_volumes(node: WholeNode) -> None:
    """fsGroup 100 by OnRootMismatch, subPaths, statistics and growth while the pod runs; the sandbox's end unmounts,
    and the unpublish removes the record.
    """
    first, second = await node.volume(), await node.volume()
    targets = {
        "/first": await node.publish(first, capability=GROUP),
        "/second": await node.publish(second, capability=GROUP),
    }
    assert await in_pod(node, targets, "stat -c '%g %a' /first /second") == "100 2775\n100 2775"
    await in_pod(node, targets, "mkdir /first/logs; echo one > /first/logs/f; echo two > /second/f")

    bound = targets["/first"].parent / "volume-subpaths" / "c" / "0"
    await asyncio.to_thread(sub_paths.prepare, str(targets["/first"]), "logs", str(bound))
    try:
        seen = await in_pod(node, {"/logs": bound, "/second": targets["/second"]}, "cat /*/f")
        assert seen.splitlines() == ["one", "two"]
    finally:
        await asyncio.to_thread(sub_paths.clean, str(bound))

    before = (await node.kubelet.stats(first, targets["/first"]))[BYTES]
    await in_pod(node, targets, "dd if=/dev/zero of=/first/large bs=1M count=16 2>/dev/null; sync")
    filled = (await node.kubelet.stats(first, targets["/first"]))[BYTES]
    assert filled.used - before.used >= 15 * MIB
    assert await node.kubelet.expand(first, targets["/first"], 192 * MIB) == 192 * MIB
    grown = (await node.kubelet.stats(first, targets["/first"]))[BYTES]
    assert grown.total - before.total > 100 * MIB

    ending = node.kubelet.unpublish(first, targets["/first"])
    await refused(ending, grpc.StatusCode.FAILED_PRECONDITION)
    await node.runtime.stop("pod")
    entries = node.daemons.paths.volumes
    assert len(await asyncio.to_thread(_entries, entries)) == 2
    await node.unpublish(first, targets["/first"])
    await node.unpublish(second, targets["/second"])
    assert await asyncio.to_thread(_entries, entries) == []
    again = await node.publish(first, capability=GROUP)
    assert await in_pod(node, {"/first": again}, "cat /first/logs/f") == "one", "it was unmounted"


def _entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.startswith(".")]
