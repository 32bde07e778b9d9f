"""What a container in the guest may do to the guest's kernel through /proc and /sys: nothing."""

import pytest

from examples.kata.vm import machine, values
from tests.e2e.microvm.conftest import MountDisk, attempt, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

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
