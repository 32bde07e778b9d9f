"""An unmodified driver behind the unit `crust-shim@`, whose mount namespace lists each mount of the driver twice."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from crust.core import deferral_keys
from crust.rpc import channel
from crust.runtime_handler.registration import Feature
from examples.drivers import minimal
from tests.integration.systemd.test_installed import KUBELET, follow, handler, main_pid, sandbox
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import Machine
from tests.support.co import Co
from tests.support.runtimes.fake_handler import ALL_FEATURES

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]  # the first one waits for the boot

DRIVER, SHIM = f"{KUBELET}/plugins/vendor/csi.sock", f"{KUBELET}/plugins/vendor-shim/csi.sock"
TARGET = f"{KUBELET}/pods/p/mount"
LEAVES = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/publish"
DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
SETTINGS = f'socket = "{SHIM}"\ndriver_socket = "{DRIVER}"\n'
PROXY = f"{KUBELET}/plugins/{minimal.NAME}/csi.sock"
PROXY_SETTINGS = f"""
[[drivers]]
name = "{minimal.NAME}"
socket = "{PROXY}"
backend = "{SHIM}"
"""


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
    async with channel.connect(f"{machine.root}{SHIM}") as connected:
        yield connected


def _leaf_mounts(mountinfo: str) -> list[str]:
    return [line for line in mountinfo.splitlines() if f" {LEAVES}/" in line]


async def test_driver_is_deferred_and_a_publish_seen_twice_is_one(
    machine: Machine, shim: grpc.aio.Channel
) -> None:
    co = Co(shim, waits=True)
    volume = await co.create("v")
    context = {**volume.volume_context, **DEFERRED}
    try:
        first = await co.publish(volume.volume_id, TARGET, volume_context=context)
        device = first.deferred_mount.block_device.path
        assert device.startswith("/dev/loop")
        pid = main_pid(machine, "crust-shim@vendor")
        seen = _leaf_mounts(machine.output("cat", f"/proc/{pid}/mountinfo"))
        on_host = _leaf_mounts(machine.output("cat", "/proc/1/mountinfo"))
        assert (len(on_host), len(seen)) == (1, 2)
        again = await co.publish(volume.volume_id, TARGET, volume_context=context)
        assert again == first
        assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == on_host
    finally:
        await co.unpublish(volume.volume_id, TARGET, flag=True)
    assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == []
    assert not os.listdir(Path(f"{machine.root}{LEAVES}"))
    await co.delete(volume.volume_id)


async def test_proxy_defers_what_it_formats_and_gives_it_back(machine: Machine) -> None:
    """For a runtime that makes no filesystems the proxy reads the device, confined, under its own unit."""
    (machine.root / "etc/crust/proxy.toml").write_text(PROXY_SETTINGS, encoding="utf-8")
    machine.output("systemctl", "start", "crust-proxy")
    runtime = handler(machine, ALL_FEATURES - {Feature.FORMAT})
    async with channel.connect(f"{machine.root}{PROXY}") as connected, runtime:
        co = Co(connected, waits=True)
        volume = await co.create("formatted")
        context = {**volume.volume_context, **DEFERRED, deferral_keys.CREATED_EMPTY: "true"}
        await co.publish(volume.volume_id, TARGET, volume_context=context)
        with sandbox(machine) as device:
            assert "ext4" in machine.output("blkid", "-p", device)
        await co.unpublish(volume.volume_id, TARGET)
        await co.delete(volume.volume_id)
