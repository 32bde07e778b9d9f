"""The installed units do what the list of a node names: the one, also with crust-kata, and one for each part.

The unit `crust-shim@` has a mount namespace of its own, which lists each mount of the vendor's driver twice.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from crust.rpc import channel
from examples.drivers import minimal
from tests.integration.systemd.test_installed import follow
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import Machine
from tests.support.co import Co
from tests.support.faults.refusals import until_probe
from tests.support.forms import node_list
from tests.support.forms.form import KUBELET, TARGET, VENDORS_SOCKET
from tests.support.forms.units import ONE, THREE, KataUnits, Units

pytestmark = pytest.mark.root

FORMS: dict[str, tuple[type[Units], tuple[str, ...], tuple[node_list.Entry, ...]]] = {
    "one": (Units, ONE, node_list.WHOLE),
    "kata": (KataUnits, (*ONE, "crust-kata"), node_list.OF_KATA),
    "three": (Units, (*THREE, "crust-shim@vendor"), node_list.WHOLE),
}
ENTRIES = [
    pytest.param(form, functools.partial(entry), id=f"{form}-{node_list.name(entry)}")
    for form, (_, _, whole) in FORMS.items()
    for entry in node_list.chosen(whole)
]
"""Each has an entry of its own, else pytest would put equal entries of several forms side by side, and start each
form again for each.
"""
FIT = "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"
KATA = "opt/kata/share/defaults/kata-containers/configuration-clh.toml"
"""As deploy/crust/kata.toml has it."""
CONTAINERD = "#!/bin/sh\necho containerd github.com/containerd/containerd/v2 v2.4.2\n"
"""What doctor asks; the stand-in serves what this version does."""
SHIM = "/run/crust/shim-vendor/csi.sock"
SETTINGS = {
    "node.toml": f"""
[[proxy.drivers]]
name = "{minimal.NAME}"
socket = "{KUBELET}/plugins/{minimal.NAME}/csi.sock"
backend = "{SHIM}"
[[shim]]
[[shim]]
socket = "{SHIM}"
driver_socket = "{VENDORS_SOCKET}"
""",
    "proxy.toml": f"""
[[drivers]]
name = "{minimal.NAME}"
socket = "{KUBELET}/plugins/{minimal.NAME}/csi.sock"
backend = "{SHIM}"
""",
    "shim-vendor.toml": f'socket = "{SHIM}"\ndriver_socket = "{VENDORS_SOCKET}"\n',
}
"""What docs/wrapping.md has of a driver beside ours, below what `crust install` writes."""
LEAVES = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/publish"
DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With crust installed as the page says."""
    capabilities.need("mount", "loop", "systemd")
    with booted_systemd.machine() as booted:
        follow(booted, "As units of systemd")
        for file, text in SETTINGS.items():
            with (booted.root / "etc/crust" / file).open("a", encoding="utf-8") as settings:
                settings.write(text)
        (booted.root / KATA).parent.mkdir(parents=True)
        (booted.root / KATA).write_text(FIT)
        containerd = booted.root / "usr/local/bin/containerd"
        containerd.write_text(CONTAINERD)
        containerd.chmod(0o755)
        booted.output("systemctl", "restart", "crust-node")
        yield booted


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Units]:
    """These units serve."""
    kind, units, _ = FORMS[request.param]
    form = kind(machine, units)
    form.serve()
    yield form
    form.run("systemctl", "stop", "crust-kata")
    form.run("rm", "-rf", "/run/crust/kata")  # by which doctor knows that it runs here


@pytest.mark.parametrize(("form", "entry"), ENTRIES, indirect=["form"], scope="module")
async def test_units_do_what_a_node_must(form: Units, entry: node_list.Entry) -> None:
    async with form.cleaned():
        await entry(form)


def _leaf_mounts(mountinfo: str) -> list[str]:
    return [line for line in mountinfo.splitlines() if f" {LEAVES}/" in line]


async def test_mount_that_a_shims_unit_sees_twice_is_one(machine: Machine) -> None:
    units = Units(machine, FORMS["three"][1])
    units.serve()
    units.output("mkdir", "-p", str(Path(TARGET).parent))
    with units.vendors_driver():
        async with channel.connect(machine.seen(SHIM)) as connected:
            await until_probe(connected, grpc.StatusCode.OK)
            co = Co(connected, waits=True)
            volume = await co.create("v")
            context = {**volume.volume_context, **DEFERRED}
            first = await co.publish(volume.volume_id, TARGET, volume_context=context)
            assert first.deferred_mount.block_device.path.startswith("/dev/loop")
            pid = units.main_pid("crust-shim@vendor")
            seen = _leaf_mounts(machine.output("cat", f"/proc/{pid}/mountinfo"))
            on_host = _leaf_mounts(machine.output("cat", "/proc/1/mountinfo"))
            assert (len(on_host), len(seen)) == (1, 2)
            again = await co.publish(volume.volume_id, TARGET, volume_context=context)
            assert again == first
            assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == on_host
            await co.unpublish(volume.volume_id, TARGET, flag=True)
            assert _leaf_mounts(machine.output("cat", "/proc/1/mountinfo")) == []
            assert not os.listdir(Path(f"{machine.root}{LEAVES}"))
            await co.delete(volume.volume_id)
