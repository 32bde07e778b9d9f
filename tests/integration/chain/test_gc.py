"""`crust gc` on the real kernel: a raw volume whose kubelet lost the pod, with its binds and its loop device."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from crust.cli.gc import collect, kernel
from crust.host.block import loop
from crust.host.mounts import mountinfo
from tests.support.co import MIB, capability
from tests.support.nodes.served_node import BlockNode

pytestmark = pytest.mark.root
PV, POD = "pv-raw", "0a1b2c3d-gone"


class Host(kernel.Kernel):
    """The host as the tests have it: in namespaces of their own, with all that they made in view."""

    def not_visible(self) -> str:
        return ""


async def _forgotten(chain: BlockNode) -> tuple[str, str]:
    """Publish a raw volume as a kubelet does, and lose the pod; volume id and the kubelet's bind."""
    base = f"{chain.places.kubelet}/plugins/kubernetes.io/csi/volumeDevices"
    target, mapped = f"{base}/publish/{PV}/{POD}", f"{base}/{PV}/dev/{POD}"
    data = Path(f"{base}/{PV}/data/vol_data.json")
    for path in (target, mapped, str(data), f"{base}/staging/{PV}/x"):
        os.makedirs(os.path.dirname(path))
    os.makedirs(f"{chain.places.kubelet}/pods")
    raw = capability(block=True)
    volume_id = (await chain.co.create("raw", raw, size=16 * MIB)).volume_id
    data.write_text(json.dumps({"driverName": "block.csi.crust.dev", "volumeHandle": volume_id}))
    staging = f"{base}/staging/{PV}"
    await chain.co.stage(volume_id, staging, raw)
    await chain.co.publish(volume_id, target, raw, defer=False, staging=staging)
    Path(mapped).touch()
    for command in (["mount", "--bind", target, mapped], ["losetup", "-f", mapped]):
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
    for changed in (os.path.dirname(target), os.path.dirname(mapped), data):
        os.utime(changed, (1_000_000_000, 1_000_000_000))
    return volume_id, mapped


async def test_forgotten_raw_volume_is_settled_when_nobody_has_it_open(chain: BlockNode) -> None:
    volume_id, mapped = await _forgotten(chain)
    options = collect.Options(chain.places.run, chain.places.kubelet, 600, dry_run=False)
    host = Host()
    with Path(mapped).open("rb"):
        (held,) = await collect.collect(options, host)
    assert (held.outcome, [check.name for check in held.checks if not check.proven]) == (
        "kept", ["device"],
    )  # fmt: skip
    assert host.loops_of(mapped)
    (settled,) = await collect.collect(options, host)
    assert (settled.outcome, settled.message) == ("undone", "")
    assert [step.split()[0] for step in settled.steps] == [
        "detach", "unmount", "NodeUnpublishVolume", "NodeUnstageVolume",
    ]  # fmt: skip
    assert await collect.collect(options, host) == ()
    assert mountinfo.below(chain.places.kubelet) == ()
    assert not any(
        volume_id in device.backing or device.backing == mapped
        for device in loop.list_named(lambda _: True)
    )
