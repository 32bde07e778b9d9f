"""A driver that knows nothing of crust, between two shims: its volumes are formatted, mounted and grown by guests."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud
from examples.kata.demo.kubelet import capability
from examples.kata.demo.node import Vendor
from tests.support.nodes.whole_node import MIB, WholeNode, whole_node

pytestmark = [
    pytest.mark.vm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
BYTES = csi_pb2.VolumeUsage.BYTES
PASSPHRASE = "correct horse battery staple"
PLAINTEXT = "what a pod wrote"
LUKS_HEADER_BYTES = 16 * MIB
CLOUD = Vendor(cloud.NAME, "examples.drivers.cloud")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wrapped_node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    """A node with a strict vendor's driver, and a StorageClass that defers."""
    async with whole_node(CLOUD) as node:
        node.kubelet.parameters = {"type": "ssd", "crust.dev/defer": "always"}
        node.kubelet.secrets = {"token": cloud.TOKEN}
        node.kubelet.attaches = True
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(wrapped_node: WholeNode) -> AsyncIterator[WholeNode]:
    yield wrapped_node
    await wrapped_node.tidy()


@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
async def test_new_volume_is_formatted_by_its_first_guest(node: WholeNode, fs_type: str) -> None:
    wanted = capability(fs_type)
    volume = await node.volume(size_bytes=320 * MIB, capability=wanted)
    assert volume.volume_context["crust.dev/created-empty"] == "true"
    target = await node.publish(volume, defer=False, capability=wanted)
    await node.output("one", target, "echo kept > /data/file; sync")
    assert fs_type in await node.output("one", target, "grep ' /data ' /proc/mounts")
    assert not _host_mounts(node, fs_type)
    await node.runtime.stop("one")
    await node.unpublish(volume, target)
    await node.kubelet.unstage(volume)

    await node.kubelet.stage(volume, wanted)
    again = await node.publish(volume, defer=False, capability=wanted)
    assert await node.output("two", again, "cat /data/file") == "kept"


async def test_expand_grows_device_by_driver_and_filesystem_by_guest(node: WholeNode) -> None:
    volume = await node.volume(size_bytes=64 * MIB)
    target = await node.publish(volume, defer=False)
    await node.output("one", target, "true")
    before = await node.kubelet.stats(volume, target)
    assert await node.kubelet.expand(volume, target, 192 * MIB) == 192 * MIB
    after = await node.kubelet.stats(volume, target)
    assert after[BYTES].total - before[BYTES].total > 100 * MIB


async def test_passphrase_of_an_encrypted_volume_is_in_no_file(node: WholeNode) -> None:
    parameters, secrets = dict(node.kubelet.parameters), dict(node.kubelet.secrets)
    node.kubelet.parameters = {**parameters, "crust.dev/encryption": "luks"}
    node.kubelet.secrets = {**secrets, "passphrase": PASSPHRASE}
    try:
        volume = await node.volume(size_bytes=64 * MIB)
        target = await node.publish(volume, defer=False)
        await node.output("one", target, f"echo '{PLAINTEXT}' > /data/file; sync")
        await node.runtime.stop("one")
        await node.unpublish(volume, target)
        await node.kubelet.unstage(volume)

        node.kubelet.secrets = {**secrets, "passphrase": "wrong horse"}
        await node.kubelet.stage(volume)
        wrong = await node.publish(volume, defer=False)
        with pytest.raises(errors.CrustError, match="the passphrase does not open it"):
            await node.run("two", wrong, "cat /data/file")
        described = await _described(node, wrong)
        assert "WrongPassphrase" in described
        assert "wrong horse" not in described
        await node.runtime.stop("two")
        await node.unpublish(volume, wrong)
        await node.kubelet.unstage(volume)

        node.kubelet.secrets = {**secrets, "passphrase": PASSPHRASE}
        await node.kubelet.stage(volume)
        again = await node.publish(volume, defer=False)
        assert await node.output("three", again, "cat /data/file") == PLAINTEXT
        usage = (await node.kubelet.stats(volume, again))[BYTES]
        assert 0 < usage.used < usage.total < 64 * MIB - LUKS_HEADER_BYTES
        files = await asyncio.to_thread(_contents, node.daemons.paths.base)
        assert any(content.startswith(b"LUKS\xba\xbe\x00\x02") for content in files.values())
        assert [path for path, content in files.items() if PASSPHRASE.encode() in content] == []
        assert [path for path, content in files.items() if PLAINTEXT.encode() in content] == []
        await node.tidy()
    finally:
        node.kubelet.parameters, node.kubelet.secrets = parameters, secrets


async def _described(node: WholeNode, target: Path) -> str:
    """What an operator reads about the volume at a target."""
    flags = (str(target), f"--run-dir={node.daemons.paths.crust_run}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "crust", "describe", *flags), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


def _contents(base: Path) -> dict[str, bytes]:
    """Every file of the node: state, records, entries, logs of all its processes, images of volumes."""
    files = (path for path in base.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files}


async def test_volume_of_the_same_driver_that_says_nothing_is_mounted_on_the_host(
    node: WholeNode,
) -> None:
    node.kubelet.parameters = {"type": "ssd"}
    try:
        volume = await node.volume()
        target = await node.publish(volume, defer=False)
    finally:
        node.kubelet.parameters = {"type": "ssd", "crust.dev/defer": "always"}
    assert not volume.volume_context
    Path(target, "file").write_text("on the host")
    assert _host_mounts(node, "ext4")


def _host_mounts(node: WholeNode, fs_type: str) -> list[str]:
    mounts = mountinfo.below(str(node.daemons.paths.kubelet))
    return [mount.target for mount in mounts if mount.fs_type == fs_type]
