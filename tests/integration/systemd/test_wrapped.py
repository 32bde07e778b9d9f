"""An unmodified driver behind the unit `crust-shim@`, whose mount namespace lists each mount of the driver twice."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.systemd.test_installed import CAPABILITY, KUBELET, follow, main_pid
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import Machine

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]  # the first one waits for the boot

DRIVER, SHIM = f"{KUBELET}/plugins/vendor/csi.sock", f"{KUBELET}/plugins/vendor-shim/csi.sock"
TARGET = f"{KUBELET}/pods/p/mount"
LEAVES = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/publish"
DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
SETTINGS = f'socket = "{SHIM}"\ndriver_socket = "{DRIVER}"\n'


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With crust installed, the driver as a unit of its own, and the shim of the page around it."""
    capabilities.need("mount", "loop", "systemd")
    with booted_systemd.machine() as booted:
        for path in ("plugins_registry", "plugins/vendor", "pods/p"):
            booted.output("mkdir", "-p", f"{KUBELET}/{path}")
        follow(booted, "As units of systemd")
        (booted.root / "etc/crust/shim-vendor.toml").write_text(SETTINGS, encoding="utf-8")
        booted.output(
            "systemd-run", "--unit=vendor", f"--working-directory={booted_systemd.CHECKOUT}",
            f"{booted_systemd.ENVIRONMENT}/bin/python", "-m", "examples.drivers.minimal",
            "--socket", DRIVER, "--state-dir", "/var/lib/vendor", "--node-id", "n1",
        )  # fmt: skip
        booted.output("systemctl", "start", "crust-shim@vendor")
        yield booted


@pytest.fixture
async def shim(machine: Machine) -> AsyncIterator[grpc.aio.Channel]:
    """What the proxy calls."""
    async with channel.connect(f"{machine.root}{SHIM}") as connected:
        yield connected


def _leaf_mounts(mountinfo: str) -> list[str]:
    return [line for line in mountinfo.splitlines() if f" {LEAVES}/" in line]


async def test_driver_is_deferred_and_a_publish_seen_twice_is_one(
    machine: Machine, shim: grpc.aio.Channel
) -> None:
    controller: csi_pb2_grpc.ControllerAsyncStub = csi_pb2_grpc.ControllerStub(shim)
    node: csi_pb2_grpc.NodeAsyncStub = csi_pb2_grpc.NodeStub(shim)
    create = csi_pb2.CreateVolumeRequest(
        name="v",
        volume_capabilities=[CAPABILITY],
        capacity_range=csi_pb2.CapacityRange(required_bytes=64 << 20),
    )
    made = await controller.CreateVolume(create, timeout=40, wait_for_ready=True)
    publish = csi_pb2.NodePublishVolumeRequest(
        volume_id=made.volume.volume_id,
        target_path=TARGET,
        volume_capability=CAPABILITY,
        volume_context={**made.volume.volume_context, **DEFERRED},
        defer_fs_ops=True,
    )
    try:
        first = await node.NodePublishVolume(publish, timeout=40)
        device = first.deferred_mount.block_device.path
        assert device.startswith("/dev/loop")
        pid = main_pid(machine, "crust-shim@vendor")
        seen = _leaf_mounts(machine.output("cat", f"/proc/{pid}/mountinfo"))
        there = _leaf_mounts(machine.output("cat", "/proc/1/mountinfo"))
        assert (len(there), len(seen)) == (1, 2)
        again = await node.NodePublishVolume(publish, timeout=40)
        assert again == first
        assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == there
    finally:
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=made.volume.volume_id, target_path=TARGET, defer_fs_ops=True
        )
        await node.NodeUnpublishVolume(unpublish, timeout=40)
    assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == []
    assert not os.listdir(Path(f"{machine.root}{LEAVES}"))
    await controller.DeleteVolume(
        csi_pb2.DeleteVolumeRequest(volume_id=made.volume.volume_id), timeout=40
    )
