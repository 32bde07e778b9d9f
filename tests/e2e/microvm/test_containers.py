"""Containers in the guest: how they end, what they see, and that a subPath never leads out of its volume.

And what one may do to the guest's kernel through /proc and /sys: nothing.
"""

import pytest

from examples.kata.vm import containers, faults, machine, values
from tests.e2e.microvm.conftest import MountDisk, attempt, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session")]


def _spec(
    name: str, *command: str, binds: tuple[values.Bind, ...] = (), **more: str
) -> values.ContainerSpec:
    return values.ContainerSpec(name, command, binds, environment=more)


async def test_unread_output_does_not_block_the_agent(vm: machine.Machine, plug: MountDisk) -> None:
    """A container that writes without end blocks when the window is full; the agent answers meanwhile."""
    flood = await vm.guest.start(_spec("flood", "cat", "/dev/zero"))
    assert await shell(vm, "echo through") == "through\n"
    taken = 0
    while taken < 4 * containers.WINDOW:
        piece = await flood.read()
        assert piece is not None
        taken += len(piece.data)
    await flood.kill()
    assert await flood.wait() == values.Exit(None, 9)
    await flood.release()


async def test_killed_container_leaves_no_process(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    script = "sleep 1000 & setsid sleep 1001 & echo up; wait"
    bind = (values.Bind(volume, "/data"),)
    family = await vm.guest.start(_spec("family", "sh", "-c", script, binds=bind))
    first = await family.read()
    assert first is not None
    await family.kill()
    assert (await family.wait()).signal == 9
    await family.release()
    assert await vm.guest.unmount(volume) is True


async def test_container_sees_only_its_own_volumes(vm: machine.Machine, mounted: MountDisk) -> None:
    mine, other = await mounted(), await mounted()
    table = await shell(vm, "cat /proc/mounts; ls /run /dev", values.Bind(mine, "/data"))
    assert " /data " in table
    assert mine not in table
    assert other not in table
    assert "vda" not in table.split(" /data ")[1]
    done = await attempt(vm, "mount -t ext4 /dev/vdb /mnt || mknod /tmp/vdb b 254 16")
    assert done.exit.code == 1


async def test_container_pins_only_its_own_volumes(vm: machine.Machine, mounted: MountDisk) -> None:
    """A new mount namespace copies every mount; each copy would keep its volume in use."""
    mine, other = await mounted(), await mounted()
    user = await vm.guest.start(_spec("user", "sleep", "1000", binds=(values.Bind(mine, "/data"),)))
    await vm.detach(other)
    await user.kill()


async def test_read_only_bind_refuses_writes(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    binds = values.Bind(volume, "/rw"), values.Bind(volume, "/ro", read_only=True)
    done = await attempt(vm, "echo x > /rw/x; cat /ro/x; echo y > /ro/y", *binds)
    assert done.exit.code == 1
    assert done.stdout == b"x\n"
    assert b"Read-only file system" in done.stderr


async def test_volume_is_mounted_nodev(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    options = (await shell(vm, "grep ' /data ' /proc/mounts", values.Bind(volume, "/data"))).split()
    assert "nodev" in options[3].split(",")


async def test_a_sub_path_is_made_and_bound(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    await shell(vm, "echo x > /data/x", values.Bind(volume, "/data", sub_path="new/dir"))
    whole = values.Bind(volume, "/data")
    assert await shell(vm, "cat /data/new/dir/x; ls -d /data/*/", whole) == (
        "x\n/data/lost+found/\n/data/new/\n"
    )
    one = values.Bind(volume, "/etc-file/x", sub_path="new/dir/x")
    assert await shell(vm, "cat /etc-file/x", one) == "x\n"


@pytest.mark.parametrize(
    "sub_path",
    ["absolute", "up", "chain", "absolute/passwd", "../other", "/etc", "fifo", "a/../.."],
)
async def test_sub_path_that_leads_out_of_its_volume_is_refused(
    vm: machine.Machine, mounted: MountDisk, sub_path: str
) -> None:
    volume = await mounted()
    whole = values.Bind(volume, "/data")
    trap = "cd /data; ln -s /etc absolute; ln -s ../../.. up; ln -s up chain; mkfifo fifo; mkdir a"
    await shell(vm, trap, whole)
    with pytest.raises(faults.GuestRefused, match=r"subPath|out of the volume"):
        await attempt(vm, "ls /data", values.Bind(volume, "/data", sub_path=sub_path))
    read_only = values.Bind(volume, "/data", sub_path=sub_path, read_only=True)
    with pytest.raises(faults.GuestRefused):
        await attempt(vm, "ls /data", read_only)


async def test_destination_through_a_symlink_of_a_volume_is_refused(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    volume, inner = await mounted(), await mounted()
    await shell(vm, "ln -s /tmp /data/inner", values.Bind(volume, "/data"))
    binds = values.Bind(volume, "/data"), values.Bind(inner, "/data/inner")
    with pytest.raises(faults.GuestRefused):
        await attempt(vm, "true", *binds)


_STEAL = """
cat > /data/thief.sh <<X
#!/bin/sh
cat /run/volumes/{theirs}/secret > /run/volumes/{mine}/stolen
X
chmod 755 /data/thief.sh
echo '|/bin/sh /run/volumes/{mine}/thief.sh' > /proc/sys/kernel/core_pattern || echo refused
ulimit -c unlimited
sh -c 'kill -SEGV $$' || true
sleep 1
ls /data
"""

# A user namespace gives its root all capabilities over new mount and PID namespaces, and so a /proc of its own.
_NEW_PROC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
USER, NEWNS, PID = 0x10000000, 0x00020000, 0x20000000
assert libc.unshare(USER) == 0, os.strerror(ctypes.get_errno())
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 0 1")
assert libc.unshare(NEWNS | PID) == 0
if os.fork() == 0:
    done = libc.mount(b"proc", b"/tmp", b"proc", 0, None)
    print("mounted" if done == 0 else "refused", flush=True)
    if done == 0:
        open("/tmp/sys/kernel/core_pattern", "w").write("|/bin/true")
        print("written", flush=True)
    os._exit(0)
os.wait()
"""


async def test_core_pattern_cannot_be_changed_to_reach_another_containers_volume(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    mine, theirs = await mounted(), await mounted()
    await shell(vm, "echo secret > /data/secret; sync", values.Bind(theirs, "/data"))
    script = _STEAL.format(mine=mine, theirs=theirs)
    listed = (await shell(vm, script, values.Bind(mine, "/data"))).split()
    assert "refused" in listed
    assert "stolen" not in listed
    assert "thief.sh" in listed


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sysrq-trigger",
        "/proc/irq/default_smp_affinity",
        "/sys/kernel/uevent_helper",
        "/sys/power/state",
    ],
)
async def test_kernel_interfaces_are_read_only(
    vm: machine.Machine, plug: MountDisk, path: str
) -> None:
    done = await attempt(vm, f": >> {path}")
    assert done.exit.code != 0
    assert b"Read-only" in done.stderr, done


async def test_kernel_memory_and_keys_are_masked(vm: machine.Machine, plug: MountDisk) -> None:
    for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kpagecount"):
        assert await shell(vm, f"head -c 1 {path} | wc -c") == "0\n", path
    assert await shell(vm, "ls /sys/firmware | wc -l") == "0\n"


async def test_user_namespace_cannot_mount_a_writable_proc(
    vm: machine.Machine, plug: MountDisk
) -> None:
    done = await vm.guest.run(values.ContainerSpec("userns", ("python3", "-c", _NEW_PROC)))
    assert done.stdout == b"refused\n", done


async def test_containers_still_use_their_own_proc(vm: machine.Machine, plug: MountDisk) -> None:
    script = "cat /proc/self/comm; echo 5 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
    assert await shell(vm, script) == "cat\n5\n"
