"""A volume in the guest of a real VM: mount, usage, grow, freeze, limits, and their refusals."""

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from crust.core import volumes
from examples.kata.vm import faults, machine, values
from tests.e2e.microvm.conftest import MIB, SMALLEST, MountDisk, attempt, make_disk, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session")]

FILESYSTEMS = ("ext4", "xfs", "btrfs")
_CHECK = {
    "ext4": ("fsck.ext4", "-f", "-n"),
    "xfs": ("xfs_repair", "-n", "-f"),
    "btrfs": ("btrfs", "check", "--readonly"),
}


@pytest.mark.parametrize("fstype", FILESYSTEMS)
async def test_detach_flushes_what_a_container_wrote(
    vm: machine.Machine, tmp_path: Path, fstype: str
) -> None:
    source = make_disk(tmp_path / "disk", fstype)
    content = os.urandom(3 * MIB)
    await vm.attach("kept", source)
    await vm.guest.mount(values.VolumeMount("kept", fstype))
    wanted = values.ContainerSpec(
        "writer", ("sh", "-c", "cat > /data/file"), (values.Bind("kept", "/data"),)
    )
    assert (await vm.guest.run(wanted, stdin=content)).exit.code == 0
    await vm.detach("kept")

    await asyncio.to_thread(
        subprocess.run, [*_CHECK[fstype], str(source)], check=True, capture_output=True
    )
    await vm.attach("again", source)
    await vm.guest.mount(values.VolumeMount("again", fstype))
    seen = await shell(vm, "sha256sum < /data/file", values.Bind("again", "/data"))
    await vm.detach("again")
    assert seen.split()[0] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("fstype", FILESYSTEMS)
async def test_usage_matches_statfs_in_the_guest(
    vm: machine.Machine, mounted: MountDisk, fstype: str
) -> None:
    volume = await mounted(fstype)
    bind = values.Bind(volume, "/data")
    await shell(vm, "dd if=/dev/zero of=/data/x bs=1M count=8; sync", bind)
    usage = await vm.usage(volume)
    block, total, available = map(
        int, (await shell(vm, "stat -f -c '%S %b %a' /data", bind)).split()
    )
    assert usage.total_bytes == total * block
    assert abs(usage.available_bytes - available * block) < MIB
    assert usage.used_bytes >= 8 * MIB
    assert usage.available_bytes + usage.used_bytes <= usage.total_bytes <= SMALLEST[fstype]


@pytest.mark.parametrize("fstype", FILESYSTEMS)
async def test_a_volume_grows_while_a_container_writes_to_it(
    vm: machine.Machine, mounted: MountDisk, tmp_path: Path, fstype: str
) -> None:
    volume = await mounted(fstype)
    before = await vm.usage(volume)
    wanted = values.ContainerSpec(
        "busy",
        (
            "sh",
            "-ec",
            "i=0; while [ ! -e /data/stop ]; do i=$((i+1)); echo $i > /data/n; sync; done; cat /data/n",
        ),
        (values.Bind(volume, "/data"),),
    )
    writer = await vm.guest.start(wanted)
    size_bytes = SMALLEST[fstype] * 2
    os.truncate(tmp_path / volume, size_bytes)
    grown = await vm.grow(volume, size_bytes)
    assert grown.total_bytes > before.total_bytes * 1.8
    assert (await vm.grow(volume, size_bytes)).total_bytes == grown.total_bytes
    await shell(vm, "touch /data/stop", values.Bind(volume, "/data"))
    done = await writer.collect(MIB)
    await writer.release()
    assert done.exit == values.Exit(0, None)
    assert int(done.stdout) > 0


async def test_read_only_volume_refuses_all_changes(vm: machine.Machine, plug: MountDisk) -> None:
    volume = await plug("ext4", read_only=True)
    with pytest.raises(faults.GuestReadOnly, match="mount it read-only"):
        await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    await vm.guest.mount(values.VolumeMount(volume, "ext4", read_only=True))
    done = await attempt(vm, "touch /data/x", values.Bind(volume, "/data"))
    assert done.exit.code == 1
    assert b"Read-only file system" in done.stderr
    with pytest.raises(faults.GuestReadOnly):
        await vm.guest.grow(volume, MIB)
    with pytest.raises(faults.DiskReadOnly):
        await vm.grow(volume, MIB)


@pytest.mark.parametrize("fstype", FILESYSTEMS)
async def test_a_frozen_volume_holds_its_writers_until_thaw(
    vm: machine.Machine, mounted: MountDisk, fstype: str
) -> None:
    volume = await mounted(fstype)
    bind = values.Bind(volume, "/data")
    await vm.guest.freeze(volume, 60)
    await vm.guest.freeze(volume, 60)
    script = "echo begins; echo x > /data/x; echo wrote"
    writer = await vm.guest.start(values.ContainerSpec("held", ("sh", "-c", script), (bind,)))
    first = await writer.read()
    assert first is not None
    assert first.data == b"begins\n"
    assert (await vm.usage(volume)).total_bytes > 0
    assert await vm.guest.thaw(volume) is True
    assert (await writer.collect(MIB)).stdout == b"wrote\n"
    await writer.release()
    assert await vm.guest.thaw(volume) is False


async def test_pending_grow_does_not_block_thaw(
    vm: machine.Machine, mounted: MountDisk, tmp_path: Path
) -> None:
    """A pending grow holds the volume's lock in the agent."""
    volume = await mounted()
    for thaw_after_s, size_bytes in ((60, 128 * MIB), (3, 256 * MIB)):
        await vm.guest.freeze(volume, thaw_after_s)
        os.truncate(tmp_path / volume, size_bytes)
        growing = asyncio.create_task(vm.grow(volume, size_bytes))
        await shell(vm, "true")  # a request that came after it is answered: it has begun
        assert not growing.done() or thaw_after_s == 3
        if thaw_after_s == 60:
            assert await vm.guest.thaw(volume) is True
        assert (await growing).total_bytes > size_bytes * 0.8
        assert await vm.guest.thaw(volume) is False


async def test_limits_end_when_the_disk_is_detached(
    vm: machine.Machine, plug: MountDisk, tmp_path: Path
) -> None:
    volume = await plug("ext4")
    assert await vm.limits(volume) == volumes.IoLimits()
    wanted = volumes.IoLimits(500, 400, 3 << 20, 2 << 20)
    for _ in range(2):
        await vm.limit(volume, wanted)
        assert await vm.limits(volume) == wanted
    await vm.limit(volume, volumes.IoLimits(write_iops=7))
    assert await vm.limits(volume) == volumes.IoLimits(write_iops=7)
    await vm.limit(volume, volumes.IoLimits(read_bytes_per_second=2**63 - 1))
    assert (await vm.limits(volume)).write_iops == 0
    await vm.limit(volume, wanted)
    await vm.detach(volume)
    await vm.attach(volume, tmp_path / volume)
    assert await vm.limits(volume) == volumes.IoLimits()
    with pytest.raises(faults.DiskNotAttached):
        await vm.limit("never-there", wanted)


async def test_mounting_again_succeeds_and_with_other_options_is_a_conflict(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    volume = await mounted()
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    with pytest.raises(faults.GuestConflict):
        await vm.guest.mount(values.VolumeMount(volume, "ext4", ("noatime",)))
    with pytest.raises(faults.GuestConflict):
        await vm.guest.mount(values.VolumeMount(volume, "ext4", read_only=True))


@pytest.mark.parametrize(
    ("fstype", "options", "error", "words"),
    [
        ("ext4", ("bogus",), faults.GuestBadRequest, "bogus"),
        ("ext4", ("remount",), faults.GuestBadRequest, "remount"),
        ("xfs", (), faults.GuestBadRequest, "EINVAL"),
        ("zfs", (), faults.GuestUnsupported, "btrfs, ext4, virtiofs, xfs"),
    ],
)
async def test_a_mount_that_fails_says_why_and_leaves_nothing(
    vm: machine.Machine,
    plug: MountDisk,
    fstype: str,
    options: tuple[str, ...],
    error: type[Exception],
    words: str,
) -> None:
    volume = await plug("ext4")
    with pytest.raises(error, match=words):
        await vm.guest.mount(values.VolumeMount(volume, fstype, options))
    with pytest.raises(faults.GuestNotFound):
        await vm.guest.usage(volume)
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))


async def test_a_volume_in_use_is_not_unmounted_and_not_unplugged(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    volume = await mounted()
    wanted = values.ContainerSpec("user", ("sleep", "1000"), (values.Bind(volume, "/data"),))
    user = await vm.guest.start(wanted)
    for remove in (vm.guest.unmount, vm.detach):
        with pytest.raises(faults.GuestBusy, match="in use by container user"):
            await remove(volume)
    assert volume in await vm.disks.serials()
    await user.kill()
    assert await user.wait() == values.Exit(None, 9)
    assert await vm.guest.unmount(volume) is True
    assert await vm.guest.unmount(volume) is False


async def test_a_disk_pulled_under_its_filesystem_is_reported_as_abnormal(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    volume, sound = await mounted(), await mounted()
    assert not (await vm.guest.health(volume)).abnormal
    await vm.disks.detach(volume, timeout_s=20)
    health = await vm.guest.health(volume)
    assert health.abnormal
    assert "gone" in health.message
    assert not (await vm.guest.health(sound)).abnormal
    assert await vm.guest.unmount(volume) is True


async def test_a_disk_of_another_vm_is_refused(
    vm: machine.Machine, plug: MountDisk, tmp_path: Path
) -> None:
    volume = await plug("ext4")
    with pytest.raises(faults.DiskInUse):
        await vm.attach("thief", tmp_path / volume)
    assert await vm.disks.serials() == (volume,)


async def test_attach_is_idempotent_and_refuses_another_disk_by_same_name(
    vm: machine.Machine, plug: MountDisk, tmp_path: Path
) -> None:
    volume = await plug("ext4")
    disk = await vm.attach(volume, tmp_path / volume)
    assert disk.size_bytes == SMALLEST["ext4"]
    other = make_disk(tmp_path / "other", "")
    with pytest.raises(faults.SerialInUse):
        await vm.attach(volume, other)
    with pytest.raises(faults.SerialInUse):
        await vm.attach(volume, tmp_path / volume, read_only=True)
    await vm.detach("never-there")


async def test_attach_without_free_slot_is_refused(vm: machine.Machine, plug: MountDisk) -> None:
    for _ in range(vm.identity.volume_slots):
        await plug("", MIB)
    with pytest.raises(faults.NoFreeSlot):
        await plug("", MIB)


@pytest.mark.parametrize("serial", ["", "-x", "a" * 21, "a/b", "a b", "a,b"])
async def test_a_serial_number_that_virtio_cannot_carry_is_refused(
    vm: machine.Machine, serial: str, tmp_path: Path
) -> None:
    with pytest.raises(faults.InvalidSerial):
        await vm.attach(serial, tmp_path / "x")


async def test_attach_source_that_is_no_disk_is_refused(
    vm: machine.Machine, tmp_path: Path
) -> None:
    for source in (tmp_path, tmp_path / "absent", Path("relative"), Path("/dev/null")):
        with pytest.raises(faults.NotADisk):
            await vm.attach("nodisk", source)
    assert await vm.disks.serials() == ()
