"""Volumes of drivers that know nothing of crust, between two shims: guests format, mount and grow them.

And encrypted volumes, of such a driver and of crust's own: only guests format, open and read them.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud
from examples.kata.demo.kubelet import capability
from examples.kata.demo.node import HANDLER, Vendor
from tests.support import capabilities
from tests.support.nodes.whole_node import MIB, WholeNode, whole_node
from tests.support.third_party import ember

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]
BYTES = csi_pb2.VolumeUsage.BYTES
DEFERRED = {"crust.dev/defer": "always"}
PASSPHRASE = "correct horse battery staple"
WRONG = "wrong horse"
PLAINTEXT = "what a pod wrote"
LUKS_HEADER_BYTES = 16 * MIB


@dataclass(frozen=True)
class Driver:
    """A driver, alone on its node; without a vendor it is crust's own. `parameters` are those of its StorageClass."""

    vendor: Vendor | None
    size_bytes: int = 320 * MIB
    parameters: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)


DRIVERS = {
    "own": Driver(None),
    "cloud": Driver(
        Vendor(cloud.NAME, "examples.drivers.cloud"),
        parameters={"type": "ssd"},
        secrets={"token": cloud.TOKEN},
    ),
    "ember": Driver(Vendor(ember.NAME, ember.__name__), ember.MIN_BYTES),
}
"""Cloud is strict; Ember-CSI is a public driver that is unmodified."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["cloud", "ember"])
async def driver(
    request: pytest.FixtureRequest, guest_image: object, acceleration: object
) -> AsyncIterator[tuple[WholeNode, Driver]]:
    if request.param == "ember":
        capabilities.need("ember")
    chosen = DRIVERS[request.param]
    async with whole_node(chosen.vendor) as node:
        node.kubelet.attaches = chosen.vendor is not None
        yield node, chosen


@pytest_asyncio.fixture(loop_scope="module")
async def node(driver: tuple[WholeNode, Driver]) -> AsyncIterator[WholeNode]:
    """The node, with a StorageClass that defers."""
    node, of = driver
    node.kubelet.parameters = {**of.parameters, **DEFERRED}
    node.kubelet.secrets = {**of.secrets}
    yield node
    await node.tidy()


async def give_back(node: WholeNode, volume: csi_pb2.Volume, target: Path, sandbox: str) -> None:
    """End the sandbox, and the publish and the stage of its volume."""
    await node.runtime.stop(sandbox)
    await node.unpublish(volume, target)
    await node.kubelet.unstage(volume)


@pytest.mark.parametrize(
    ("driver", "fs_type"),
    [("cloud", "ext4"), ("cloud", "xfs"), ("ember", "ext4")],
    indirect=["driver"],
)
async def test_volume_formatted_by_first_guest_is_kept_and_grown_later(
    driver: tuple[WholeNode, Driver], node: WholeNode, fs_type: str
) -> None:
    wanted, size_bytes = capability(fs_type), driver[1].size_bytes
    volume = await node.volume(size_bytes=size_bytes, capability=wanted)
    assert volume.volume_context["crust.dev/created-empty"] == "true"
    target = await node.publish(volume, defer=False, capability=wanted)
    await node.output("one", target, "echo kept > /data/file; sync")
    assert fs_type in await node.output("one", target, "grep ' /data ' /proc/mounts")
    assert not host_mounts(node)
    await give_back(node, volume, target, "one")

    await node.kubelet.stage(volume, wanted)
    again = await node.publish(volume, defer=False, capability=wanted)
    assert await node.output("two", again, "cat /data/file") == "kept"
    before = (await node.kubelet.stats(volume, again))[BYTES]
    assert await node.kubelet.expand(volume, again, 2 * size_bytes) == 2 * size_bytes
    after = (await node.kubelet.stats(volume, again))[BYTES]
    assert after.total > 1.5 * before.total
    assert await node.output("two", again, "cat /data/file") == "kept"


@pytest.mark.parametrize("driver", ["own", "cloud"], indirect=True)
async def test_encrypted_volume_is_opened_by_guests_alone(
    driver: tuple[WholeNode, Driver], node: WholeNode
) -> None:
    """A wrong passphrase is what an operator reads; neither it nor the right one is in a file."""
    secrets = driver[1].secrets
    node.kubelet.parameters["crust.dev/encryption"] = "luks"
    node.kubelet.secrets = {**secrets, "passphrase": PASSPHRASE}
    volume = await node.volume(size_bytes=96 * MIB)
    target = await node.publish(volume, defer=False)
    await node.output("one", target, f"echo '{PLAINTEXT}' > /data/file; sync")
    await give_back(node, volume, target, "one")

    node.kubelet.secrets = {**secrets, "passphrase": WRONG}
    await node.kubelet.stage(volume)
    wrong = await node.publish(volume, defer=False)
    with pytest.raises(errors.CrustError, match="the passphrase does not open it"):
        await node.run("two", wrong, "cat /data/file")
    rows = json.loads(await crust(node, "volumes", f"--target={wrong}", "--output=json"))["volumes"]
    assert [row["state"] for row in rows] == ["published"], "the sandbox has given the claim up"
    for shown in (rows[0]["message"], await crust(node, "describe", str(wrong))):
        assert "WrongPassphrase" in shown
        assert "the passphrase does not open it" in shown
        assert WRONG not in shown
    await give_back(node, volume, wrong, "two")

    node.kubelet.secrets = {**secrets, "passphrase": PASSPHRASE}
    await node.kubelet.stage(volume)
    again = await node.publish(volume, defer=False)
    assert await node.output("three", again, "cat /data/file") == PLAINTEXT
    before = (await node.kubelet.stats(volume, again))[BYTES]
    assert 0 < before.used < before.total < 96 * MIB - LUKS_HEADER_BYTES, "of what is in it"
    await node.output("three", again, "dd if=/dev/zero of=/data/f bs=1M count=16; sync")
    after = (await node.kubelet.stats(volume, again))[BYTES]
    assert after.total == before.total
    assert 15 * MIB <= after.used - before.used <= 17 * MIB
    files = await asyncio.to_thread(contents, node.daemons.paths.base)
    assert any(content.startswith(b"LUKS\xba\xbe\x00\x02") for content in files.values())
    for secret in (PASSPHRASE, WRONG, PLAINTEXT):
        assert [path for path, content in files.items() if secret.encode() in content] == []


async def test_volume_in_use_outlives_death_of_driver_shims_and_proxy(
    guest_image: object, acceleration: object
) -> None:
    capabilities.need("ember")
    async with whole_node(DRIVERS["ember"].vendor) as node:
        node.kubelet.attaches, node.kubelet.parameters = True, DEFERRED
        volume = await node.volume(size_bytes=ember.MIN_BYTES)
        target = await node.publish(volume, defer=False)
        await node.output("one", target, "echo kept > /data/file; sync")
        processes = ("driver", "controller", "shim", "proxy")
        for process in processes:
            await node.daemons.kill(process)
        for process in processes:
            await node.daemons.start(process)
        await node.kubelet.wait_ready(HANDLER)
        grown = await node.kubelet.expand(volume, target, 2 * ember.MIN_BYTES)
        assert grown == 2 * ember.MIN_BYTES
        assert (await node.kubelet.stats(volume, target))[BYTES].total > 1.5 * ember.MIN_BYTES
        assert await node.output("one", target, "cat /data/file") == "kept"
        await node.tidy()


async def crust(node: WholeNode, *words: str) -> str:
    """The output of a command, as an operator runs it."""
    command = (sys.executable, "-m", "crust", *words)
    process = await asyncio.create_subprocess_exec(
        *command, f"--run-dir={node.daemons.paths.crust_run}", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


def contents(base: Path) -> dict[str, bytes]:
    """Every file of the node: state, records, entries, logs of all its processes, images of volumes."""
    files = (path for path in base.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files}


def host_mounts(node: WholeNode) -> set[str]:
    """The types of the filesystems that are mounted for pods; the bind of a device is none."""
    fs_types = {mount.fs_type for mount in mountinfo.below(str(node.daemons.paths.kubelet))}
    return fs_types & {"ext4", "xfs"}
