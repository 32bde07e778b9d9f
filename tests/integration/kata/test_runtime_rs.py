"""What is different with Kata's runtime-rs: one container at a time has a volume, no group, the shim's version."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from crust.host.block import devices, loop, users
from crust.kata import keeper_watch
from crust.kata.entry import Kind
from crust.kata.preflight import KataUnfit
from tests.integration.kata.conftest import (
    ONE,
    TWO,
    KataNode,
    container,
    end,
    keeper_pids,
    pod,
    running,
    running_rust,
    soon,
)
from tests.support import processes
from tests.support.kata.sandbox import StandInRustSandbox
from tests.support.raised import raised

pytestmark = pytest.mark.root

MakeDevice = Callable[[str], loop.LoopDevice]
FIT = '[hypervisor.clh]\nshared_fs = "virtio-fs"\n[runtime]\nname = "virt_container"\n'
SAYS = "#!/bin/sh\necho 'Kata Containers containerd shim (Rust): id: io.containerd.kata.v2, version: {}'\n"


@pytest.fixture
def rs(node: KataNode) -> KataNode:
    """A node whose Kata is runtime-rs 4.1.0."""
    node.configuration.write_text(FIT)
    node.shim = node.directory / "containerd-shim-kata-v2"
    node.shim.write_text(SAYS.format("4.1.0"))
    node.shim.chmod(0o755)
    return node


@pytest.fixture
def one(rs: KataNode) -> Iterator[StandInRustSandbox]:
    """The first sandbox."""
    with running_rust(rs, ONE) as made:
        yield made


async def test_containers_of_pod_have_volume_one_after_other(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    bridge = rs.bridge()
    for name in ("container-init", "container-app", "container-again"):
        current = container(record.target.text, id_=name)
        await bridge.create(pod(pid=one.pid), current, soon())
        await bridge.create(pod(pid=one.pid), current, soon())  # the validation
        assert rs.kind(record) is Kind.REAL
        one.create_container(current.id, record.device, "/data0")
        await bridge.start(pod(pid=one.pid), current, soon())
        assert rs.kind(record) is Kind.PLACEHOLDER
        beside = container(record.target.text, id_="container-beside", name="beside")
        with raised("VolumeInUseInSandbox"):
            await bridge.create(pod(), beside, soon())
        assert rs.kind(record) is Kind.PLACEHOLDER
        one.detach(record.device)
        await bridge.ended(current)
    claim = rs.claim(record)
    assert claim is not None
    assert claim.sandbox_id == ONE
    end(rs, one)
    assert not users.is_held(record.block)


async def test_container_waits_for_start_of_another_and_shares_its_mount(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    bridge, target = rs.bridge(), record.target.text
    with raised("VolumeInUseInSandbox"):
        await bridge.create(pod(), container(target, target), soon())
    assert rs.claim(record) is None
    await bridge.create(pod(), container(target), soon())
    with raised("VolumeInUseInSandbox"):
        beside = container(target, id_="container-0002", name="beside")
        await bridge.create(pod(), beside, soon())
    assert rs.kind(record) is Kind.REAL


async def test_next_attempt_gets_the_volume_after_a_failed_one(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    """No event follows an attach that failed, and the machine has nothing."""
    record = rs.publish("a", device("a").path)
    bridge = rs.bridge()
    for attempt in ("container-0001", "container-0002", "container-0003"):
        await bridge.create(pod(), container(record.target.text, id_=attempt), soon())
    one.create_container("container-0003", record.device, "/data0")
    await bridge.start(pod(), container(record.target.text, id_="container-0003"), soon())
    assert rs.kind(record) is Kind.PLACEHOLDER


async def test_machine_of_qemu_has_volume_until_it_ends(rs: KataNode, device: MakeDevice) -> None:
    """No file or socket names it: only the process that the engine names, with the sandbox's name, may claim."""
    rs.configuration.write_text(FIT.replace("clh", "qemu"))
    record = rs.publish("a", device("a").path)
    app = container(record.target.text)
    with running_rust(rs, ONE, "qemu") as qemu, running_rust(rs, TWO, "qemu") as other:
        for named in (0, other.pid):
            with raised("VmUnknown", match="the engine names no QEMU of it"):
                await rs.bridge().create(pod(pid=named), app, soon())
            assert rs.claim(record) is None
        bridge, of_qemu = rs.bridge(), pod(pid=qemu.pid)
        await bridge.create(of_qemu, app, soon())
        qemu.create_container(app.id, record.device, "/data0")
        await bridge.start(of_qemu, app, soon())
        watch = keeper_watch.KeeperWatch(rs.grants(), rs.builds())
        _kill_keepers(rs, ONE)
        try:
            await watch.look_at_keepers()  # the engine names no process to it
        finally:
            watch.close()
        second = container(record.target.text, pod_id=TWO, id_="container-0002")
        with raised("HeldBySandbox"):
            await rs.bridge().create(pod(TWO, pid=other.pid), second, soon())
        end(rs, qemu)
        await rs.bridge().create(pod(TWO, pid=other.pid), second, soon())


def _kill_keepers(node: KataNode, sandbox_id: str) -> None:
    pids = keeper_pids(node, sandbox_id)
    with processes.ending(*pids):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


async def test_path_in_guest_is_noted_from_start_to_end(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    bridge, app = rs.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.attach(record.device)
    path = one.make_mount("/data0")
    await bridge.start(pod(), app, soon())
    assert bridge.uses.of(record.digest, ONE).guest_path == path
    assert bridge.uses.of(record.digest, TWO).guest_path == ""
    again = rs.bridge()  # the daemon was restarted
    await again.synchronize({ONE: pod()}, [container(record.target.text, is_running=True)])
    assert again.uses.of(record.digest, ONE).guest_path == path
    await bridge.ended(app)
    assert bridge.uses.of(record.digest, ONE).guest_path == ""


async def test_group_and_writable_device_to_be_read_only_are_refused(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    os.chown(record.target.text, -1, 3000)  # a kubelet, after the publish
    with raised("UnsupportedByHandler", match="GROUP"):
        await rs.bridge().create(pod(), container(record.target.text), soon())
    reader = rs.publish("b", device("b").path, readonly=True)
    with raised("DeviceWritable"):
        await rs.bridge().create(pod(), container(reader.target.text), soon())
    devices.set_readonly(reader.device, readonly=True)
    await rs.bridge().create(pod(), container(reader.target.text), soon())
    assert rs.kind(reader) is Kind.REAL
    assert rs.claim(record) is None


async def test_container_without_volume_attached_by_kata_does_not_start(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    bridge, app = rs.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.make_mount("/data0")
    with raised("VolumeNotAttached", match="has not opened"):
        await bridge.start(pod(), app, soon())


async def test_other_runtime_and_older_shim_are_noticed_at_next_create(
    rs: KataNode, device: MakeDevice, one: StandInRustSandbox
) -> None:
    record = rs.publish("a", device("a").path)
    bridge = rs.bridge()
    with running(rs, TWO), raised("OtherKataRuntime", match="Go runtime has made"):
        of_two = container(record.target.text, pod_id=TWO, id_="container-0002")
        await bridge.create(pod(TWO), of_two, soon())
    await bridge.create(pod(), container(record.target.text), soon())
    assert rs.shim is not None
    rs.shim.write_text(SAYS.format("3.30.0") + "# downgraded\n")
    with pytest.raises(KataUnfit, match=r"before 4\.0"):
        await bridge.create(pod(), container(record.target.text, id_="container-0003"), soon())
