"""KEP-2857, story 1, from end to end.

Stories 2 to 6 are about versions and refusals and need no guest: tests/integration/wrap/test_own_driver.py.
"""

import asyncio
from pathlib import Path

import grpc
import pytest

from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import capability
from examples.kata.runtime import messages
from tests.support.kubelet import sub_paths
from tests.support.nodes.whole_node import MIB, WholeNode, refusal

pytestmark = [
    pytest.mark.vm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
BYTES = csi_pb2.VolumeUsage.BYTES
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
async def test_story_1_everything_is_deferred_for_a_pod_with_two_volumes(node: WholeNode) -> None:
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

    code, why = await refusal(node.kubelet.unpublish(first, targets["/first"]))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, why
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
