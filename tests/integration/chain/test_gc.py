"""`crust gc` on the real kernel: a raw volume whose kubelet lost the pod, with its binds and its loop device."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from crust.cli.gc import kernel, run
from crust.host.block import loop_devices
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.chain.conftest import MIB, MODE, Chain

pytestmark = pytest.mark.root
PV, POD = "pv-raw", "0a1b2c3d-gone"


class Host(kernel.Host):
    """The host as the tests have it: in namespaces of their own, with all that they made in view."""

    def not_visible(self) -> str:
        return ""


async def _forgotten(chain: Chain) -> tuple[str, str]:
    """Publish a raw volume as a kubelet does, and lose the pod; volume id and the kubelet's bind."""
    base = f"{chain.places.kubelet}/plugins/kubernetes.io/csi/volumeDevices"
    target, mapped = f"{base}/publish/{PV}/{POD}", f"{base}/{PV}/dev/{POD}"
    data = Path(f"{base}/{PV}/data/vol_data.json")
    for path in (target, mapped, str(data), f"{base}/staging/{PV}/x"):
        os.makedirs(os.path.dirname(path))
    os.makedirs(f"{chain.places.kubelet}/pods")
    capability = csi_pb2.VolumeCapability(
        block=csi_pb2.VolumeCapability.BlockVolume(),
        access_mode=csi_pb2.VolumeCapability.AccessMode(mode=MODE.SINGLE_NODE_WRITER),
    )
    created = await csi_pb2_grpc.ControllerStub(chain.connected).CreateVolume(
        csi_pb2.CreateVolumeRequest(
            name="raw",
            volume_capabilities=[capability],
            capacity_range=csi_pb2.CapacityRange(required_bytes=16 * MIB),
        ),
        timeout=30,
    )
    volume_id: str = created.volume.volume_id
    data.write_text(json.dumps({"driverName": "block.csi.crust.dev", "volumeHandle": volume_id}))
    staging = f"{base}/staging/{PV}"
    await chain.co.node.NodeStageVolume(
        csi_pb2.NodeStageVolumeRequest(
            volume_id=volume_id, volume_capability=capability, staging_target_path=staging
        ),
        timeout=30,
    )
    await chain.co.node.NodePublishVolume(
        csi_pb2.NodePublishVolumeRequest(
            volume_id=volume_id,
            volume_capability=capability,
            staging_target_path=staging,
            target_path=target,
        ),
        timeout=30,
    )
    Path(mapped).touch()
    for command in (["mount", "--bind", target, mapped], ["losetup", "-f", mapped]):
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
    for changed in (os.path.dirname(target), os.path.dirname(mapped), data):
        os.utime(changed, (1_000_000_000, 1_000_000_000))
    return volume_id, mapped


async def test_forgotten_raw_volume_is_settled_when_nobody_has_it_open(chain: Chain) -> None:
    volume_id, mapped = await _forgotten(chain)
    options = run.Options(chain.places.run, chain.places.kubelet, 600, dry_run=False)
    host = Host()
    with Path(mapped).open("rb"):
        (held,) = await run.collect(options, host)
    assert (held.outcome, [each.name for each in held.checks if not each.proven]) == (
        "kept", ["device"],
    )  # fmt: skip
    assert host.loops_of(mapped)
    (settled,) = await run.collect(options, host)
    assert (settled.outcome, settled.message) == ("settled", "")
    assert [step.split()[0] for step in settled.steps] == [
        "detach", "unmount", "NodeUnpublishVolume", "NodeUnstageVolume",
    ]  # fmt: skip
    assert await run.collect(options, host) == ()
    assert mountinfo.below(chain.places.kubelet) == ()
    assert not any(
        volume_id in each.backing or each.backing == mapped for each in loop_devices.list_all()
    )
    request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
    await csi_pb2_grpc.ControllerStub(chain.connected).DeleteVolume(request, timeout=30)
