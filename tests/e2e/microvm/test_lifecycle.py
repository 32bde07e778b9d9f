"""A VM outlives its parent and is adopted; a failed start leaves no QEMU; guest failures are detected."""

import asyncio
import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import volumes
from examples.kata.guest import image
from examples.kata.vm import faults, machine, spec, values
from tests.e2e.microvm.conftest import MIB, make_disk, shell

pytestmark = pytest.mark.vm

_DATA = values.Bind("vol", "/data")

_PARENT = """
import asyncio, os, sys
from pathlib import Path
from examples.kata.guest import image
from examples.kata.vm import machine, spec, values

async def main():
    directory, built, acceleration, disk, lock = sys.argv[1:]
    wanted = spec.MachineSpec("orphan", image.load(Path(built)), acceleration, volume_slots=2)
    vm = await machine.start(wanted, Path(directory))
    await vm.descriptors.hold("vol", [int(lock)])
    await vm.attach("vol", Path(disk))
    await vm.guest.mount(values.VolumeMount("vol", "ext4"))
    script = "echo before; while [ ! -e /data/go ]; do :; done; echo after; exit 3"
    bind = values.Bind("vol", "/data")
    container = await vm.guest.start(values.ContainerSpec("kept", ("sh", "-c", script), (bind,)))
    assert (await container.read()).data == b"before\\n"
    await vm.guest.freeze("vol", 600)
    print(vm.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def wanted(guest_image: image.GuestImage, acceleration: spec.Acceleration) -> spec.MachineSpec:
    return spec.MachineSpec("lifecycle", guest_image, acceleration, volume_slots=2)


def _qemu_of(directory: Path) -> list[int]:
    """QEMU processes that name the directory on their command line."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if b"qemu-system" in command.split(b"\0")[0] and os.fsencode(directory) in command:
            pids.append(int(name))
    return pids


def _is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def _orphan(directory: Path, wanted: spec.MachineSpec, disk: Path, lock: Path) -> int:
    """Start a VM in a process of its own, kill that with SIGKILL, and return QEMU's pid."""
    with lock.open("w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PARENT, str(directory), str(wanted.image.directory)),
            *(wanted.acceleration, str(disk), str(file.fileno())),
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    return pid


async def test_vm_whose_parent_was_killed_runs_on_and_is_adopted(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    disk = await asyncio.to_thread(make_disk, tmp_path / "disk", "ext4")
    lock = tmp_path / "lock"
    pid = await _orphan(vm_directory, wanted, disk, lock)
    assert not _is_free(lock)

    vm = await machine.adopt(vm_directory)
    assert (vm.pid, vm.name) == (pid, "orphan")
    assert vm.guest.hello.volumes == ["vol"]
    assert await vm.disks.serials() == ("vol",)
    assert await vm.guest.thaw("vol") is True
    assert [row.container for row in await vm.guest.containers()] == ["kept"]
    kept = await vm.guest.attach("kept")
    await shell(vm, "touch /data/go", _DATA)
    done = await kept.collect(MIB)
    assert done == values.Completed(values.Exit(3, None), b"after\n", b"")
    await vm.attach("vol", disk)
    os.truncate(disk, 128 * MIB)
    assert (await vm.grow("vol", 128 * MIB)).total_bytes > 100 * MIB
    assert await vm.stop() == []
    assert _qemu_of(vm_directory) == []
    assert _is_free(lock)
    await asyncio.to_thread(subprocess.run, ["fsck.ext4", "-fn", str(disk)], check=True)


async def test_vm_has_one_controlling_process_and_its_directory_one_vm(
    vm_directory: Path, wanted: spec.MachineSpec
) -> None:
    vm = await machine.start(wanted, vm_directory)
    for intruder in (machine.adopt, machine.destroy):
        with pytest.raises(faults.VmAlreadyControlled):
            await intruder(vm_directory)
    with pytest.raises(faults.VmAlreadyControlled):
        await machine.start(wanted, vm_directory)
    await vm.close()
    await vm.close()
    with pytest.raises(faults.VmAlreadyRuns):
        await machine.start(wanted, vm_directory)
    again = await machine.adopt(vm_directory)
    await again.guest.ping()
    await again.stop()
    with pytest.raises(faults.VmGone):
        await machine.adopt(vm_directory)
    assert await machine.destroy(vm_directory) is False
    # The files of a dead VM do not prevent a start.
    third = await machine.start(wanted, vm_directory)
    await third.kill()


async def test_a_vm_that_does_not_answer_is_destroyed(
    vm_directory: Path, wanted: spec.MachineSpec
) -> None:
    vm = await machine.start(wanted, vm_directory)
    await vm.disks._control.execute("stop")
    with pytest.raises(faults.AgentTimedOut):
        await vm.guest.ping(timeout_s=0.2)
    await vm.close()
    assert await machine.destroy(vm_directory) is True
    assert _qemu_of(vm_directory) == []


async def test_start_cancelled_at_any_step_leaves_no_qemu_nor_lock(
    vm_directory: Path, wanted: spec.MachineSpec
) -> None:
    """The threads that prepare and spawn continue when their caller is cancelled."""
    for steps in range(40):
        starting = asyncio.create_task(machine.start(wanted, vm_directory))
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert _qemu_of(vm_directory) == []
    vm = await machine.start(wanted, vm_directory)
    await vm.kill()
    await vm.kill()
    assert not vm.runs()


async def test_guest_crash_is_detected_and_volume_recovers_in_next_vm(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    disk = await asyncio.to_thread(make_disk, tmp_path / "disk", "ext4")
    vm = await machine.start(wanted, vm_directory)
    await vm.attach("vol", disk)
    await vm.guest.mount(values.VolumeMount("vol", "ext4"))
    await shell(vm, "echo safe > /data/file; sync", _DATA)
    waiting = await vm.guest.start(values.ContainerSpec("waiting", ("sleep", "1000")))
    await _sysrq(vm, b"c")
    with pytest.raises(faults.AgentDisconnected):
        await waiting.wait()
    await vm.wait()
    assert not vm.runs()
    assert "sysrq" in vm.console.text()
    await vm.kill()

    vm = await machine.start(wanted, vm_directory)
    await vm.attach("vol", disk)
    await vm.guest.mount(values.VolumeMount("vol", "ext4"))
    assert await shell(vm, "cat /data/file", _DATA) == "safe\n"
    await vm.stop()


async def test_a_filesystem_that_turned_read_only_is_reported_as_abnormal(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    vm = await machine.start(wanted, vm_directory)
    for fstype in ("ext4", "xfs"):
        disk = await asyncio.to_thread(make_disk, tmp_path / fstype, fstype)
        await vm.attach(fstype, disk)
        await vm.guest.mount(values.VolumeMount(fstype, fstype))
    await _sysrq(vm, b"u")  # remounts everything read-only
    for fstype in ("ext4", "xfs"):
        while not (health := await vm.guest.health(fstype)).abnormal:
            pass  # the kernel does it in its own time; the timeout of the test is the limit
        assert health.message == "the filesystem turned read-only after an error"
    await vm.stop()


async def _sysrq(vm: machine.Machine, key: bytes) -> None:
    """A SysRq key on the serial console; no container can press it."""
    await vm._control.execute("chardev-send-break", {"id": "console"})
    (vm.directory / "console.in").write_bytes(key)


async def _with_another_agent(vm: machine.Machine) -> machine.Machine:
    """The VM after its agent was killed by the kernel, and PID 1 has started another; a container sleeps in /data."""
    first = vm.guest.hello.agent
    await vm.guest.start(values.ContainerSpec("sleeper", ("sleep", "1000"), (_DATA,)))
    await _sysrq(vm, b"f")
    while vm.guest.hello.agent == first:
        # The kill is asynchronous: the dying agent may still answer a greeting.
        await vm.close()
        vm = await machine.adopt(vm.directory)
    return vm


async def test_restarted_agent_finds_the_container_that_is_open(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    """Without the passphrase, which no agent keeps."""
    disk = await asyncio.to_thread(make_disk, tmp_path / "disk", "", 128 * MIB)
    secret = values.VolumeMount(
        "vol", "ext4", format=volumes.GuestFormat(), encrypted=True, passphrase="correct horse"
    )
    vm = await machine.start(wanted, vm_directory)
    await vm.attach("vol", disk)
    before = await vm.guest.mount(secret)
    vm = await _with_another_agent(vm)
    await vm.guest.mount(dataclasses.replace(secret, passphrase=None))
    assert not (await vm.guest.health("vol")).abnormal
    await asyncio.to_thread(os.truncate, disk, 256 * MIB)
    grown = await vm.grow("vol", 256 * MIB)
    assert grown.total_bytes > before.usage.total_bytes + 64 * MIB
    assert await vm.guest.shutdown() == []
    await vm.kill()


async def test_dead_agent_is_restarted_and_volumes_stay_mounted(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    """The kernel's out-of-memory killer takes the largest process, which is the agent.

    The next agent thaws what it had frozen. A shutdown also thaws, because a blocked writer cannot be killed.
    """
    disk = await asyncio.to_thread(make_disk, tmp_path / "disk", "ext4")
    vm = await machine.start(wanted, vm_directory)
    await vm.attach("vol", disk)
    await vm.guest.mount(values.VolumeMount("vol", "ext4"))
    await vm.guest.freeze("vol", 600)
    vm = await _with_another_agent(vm)
    assert vm.guest.hello.volumes == ["vol"]
    assert await vm.guest.health("vol") == values.Condition(abnormal=False, message="")
    with pytest.raises(faults.GuestBusy, match="sleep 1000"):
        await vm.guest.unmount("vol")
    assert _qemu_of(vm_directory) == [vm.pid]
    assert await shell(vm, "echo x > /data/x; cat /data/x", _DATA) == "x\n"
    await vm.guest.freeze("vol", 600)
    script = "echo begins; echo y > /data/y"
    writer = await vm.guest.start(values.ContainerSpec("held", ("sh", "-c", script), (_DATA,)))
    assert await writer.read() is not None
    assert await vm.guest.shutdown() == []
    await vm.kill()


async def test_directory_shared_by_virtio_fs_is_seen_in_guest(
    vm_directory: Path, wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("from the host\n")
    share = spec.Share("shared", tmp_path, "virtiofs")
    vm = await machine.start(dataclasses.replace(wanted, shares=(share,)), vm_directory)
    await vm.guest.mount(values.VolumeMount("shared", "virtiofs"))
    bind = values.Bind("shared", "/data")
    assert await shell(vm, "cat /data/file; echo back > /data/answer", bind) == "from the host\n"
    assert (tmp_path / "answer").read_text() == "back\n"
    await vm.stop()


async def test_the_standard_kernel_mounts_a_directory_shared_by_9p(
    vm_directory: Path,
    acceleration: spec.Acceleration,
    guest_image: image.GuestImage,
    tmp_path: Path,
) -> None:
    standard = await asyncio.to_thread(image.build, guest_image.directory.parent, "standard")
    (tmp_path / "file").write_text("from the host\n")
    share = spec.Share("shared", tmp_path, "9p")
    wanted = spec.MachineSpec("9p", standard, acceleration, memory_mib=512, shares=(share,))
    vm = await machine.start(wanted, vm_directory)
    await vm.guest.mount(values.VolumeMount("shared", "9p", ("cache=loose", "msize=262144")))
    bind = values.Bind("shared", "/data")
    assert await shell(vm, "cat /data/file", bind) == "from the host\n"
    disk = await asyncio.to_thread(make_disk, tmp_path / "disk", "ext4")
    await vm.attach("vol", disk)
    await vm.guest.mount(values.VolumeMount("vol", "ext4"))
    await vm.stop()


async def test_a_directory_that_others_may_use_is_refused(
    wanted: spec.MachineSpec, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    long = tmp_path / ("x" * 100)
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    for directory in (open_to_all, long, link, Path("relative")):
        with pytest.raises(faults.InvalidVmDirectory):
            await machine.start(wanted, directory)
    with pytest.raises(faults.VmGone):
        await machine.adopt(tmp_path / "never")
