"""Containers in the guest: how they end, what they see, and that a subPath never leads out of its volume."""

import asyncio
import hashlib
import os

import pytest

from examples.kata.vm import containers, faults, machine, values
from tests.e2e.microvm.conftest import MIB, MountDisk, attempt, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]


def _spec(
    name: str, *command: str, binds: tuple[values.Bind, ...] = (), **more: str
) -> values.ContainerSpec:
    return values.ContainerSpec(name, command, binds, environment=more)


async def test_run_returns_stdout_stderr_and_exit_code(
    vm: machine.Machine, plug: MountDisk
) -> None:
    done = await attempt(vm, "echo out; echo err >&2; exit 7")
    assert done == values.Completed(values.Exit(7, None), b"out\n", b"err\n")


async def test_run_sets_environment_directory_and_ids(vm: machine.Machine, plug: MountDisk) -> None:
    wanted = values.ContainerSpec(
        "env",
        ("sh", "-c", "echo $WORD; pwd; id -u; id -g; id -G; echo $$"),
        environment={"WORD": "two words"},
        directory="/tmp",
        uid=1000,
        gid=1001,
        groups=(5, 6),
    )
    done = await vm.guest.run(wanted)
    assert done.stdout.decode().splitlines() == [
        *("two words", "/tmp", "1000", "1001", "1001 5 6", "1"),
    ]


async def test_a_python_script_runs(vm: machine.Machine, mounted: MountDisk) -> None:
    script = "import hashlib, json, os, time; os.sync(); print(json.dumps(os.listdir('/data')))"
    bind = (values.Bind(await mounted(), "/data"),)
    done = await vm.guest.run(_spec("python", "python3", "-c", script, binds=bind))
    assert (done.stdout, done.stderr) == (b'["lost+found"]\n', b"")


async def test_stdin_larger_than_any_buffer_arrives(vm: machine.Machine, plug: MountDisk) -> None:
    content = os.urandom(2 * MIB)
    done = await vm.guest.run(_spec("in", "sha256sum"), stdin=content)
    assert done.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()


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


async def test_two_streams_stay_within_one_window(vm: machine.Machine, plug: MountDisk) -> None:
    """Output beyond the window is a protocol violation; both streams share one window."""
    script = "head -c 3000000 /dev/zero & head -c 3000000 /dev/zero >&2 & wait"
    done = await vm.guest.run(_spec("both", "sh", "-c", script), limit_bytes=8 * MIB)
    assert (len(done.stdout), len(done.stderr)) == (3_000_000, 3_000_000)


async def test_output_above_limit_is_an_error_and_ends_the_container(
    vm: machine.Machine, plug: MountDisk
) -> None:
    with pytest.raises(faults.OutputTooLarge):
        await vm.guest.run(_spec("large", "cat", "/dev/zero"), limit_bytes=MIB)
    assert await vm.guest.containers() == []


async def test_a_container_that_takes_too_long_is_killed(
    vm: machine.Machine, plug: MountDisk
) -> None:
    with pytest.raises(faults.ContainerTimedOut):
        await vm.guest.run(_spec("slow", "sleep", "1000"), timeout_s=0.5)
    assert await vm.guest.containers() == []


async def test_containers_run_at_the_same_time(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    script = "echo {0} > /data/{0}; while [ ! -e /data/{1} ]; do :; done; echo met"
    bind = (values.Bind(volume, "/data"),)
    both = (
        vm.guest.run(_spec("one", "sh", "-c", script.format(1, 2), binds=bind)),
        vm.guest.run(_spec("two", "sh", "-c", script.format(2, 1), binds=bind)),
    )
    assert [done.stdout for done in await asyncio.gather(*both)] == [b"met\n", b"met\n"]


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


async def test_command_that_cannot_run_leaves_nothing(vm: machine.Machine, plug: MountDisk) -> None:
    with pytest.raises(faults.GuestNotFound, match="nosuch"):
        await vm.guest.run(_spec("absent", "nosuch"))
    with pytest.raises(faults.GuestNotFound):
        await vm.guest.run(values.ContainerSpec("nodir", ("true",), directory="/nowhere"))
    with pytest.raises(faults.GuestBadRequest):
        await vm.guest.run(_spec("empty"))
    assert await vm.guest.containers() == []


async def test_a_name_in_use_is_a_conflict(vm: machine.Machine, plug: MountDisk) -> None:
    await vm.guest.start(_spec("same", "sleep", "1000"))
    other = vm.guest.start(_spec("same", "sleep", "1000"))
    with pytest.raises(faults.GuestConflict):
        await other


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


async def test_sub_path_may_follow_inner_links(vm: machine.Machine, mounted: MountDisk) -> None:
    volume = await mounted()
    whole = values.Bind(volume, "/data")
    await shell(vm, "mkdir -p /data/a/b; echo in > /data/a/b/x; ln -s a/b /data/inside", whole)
    bind = values.Bind(volume, "/data", sub_path="inside")
    assert await shell(vm, "cat /data/x", bind) == "in\n"


@pytest.mark.parametrize(
    "sub_path",
    ["absolute", "up", "chain", "absolute/passwd", "../other", "/etc", "fifo", "a/../.."],
)
async def test_a_sub_path_that_leads_out_of_its_volume_is_refused(
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


async def test_unmounted_volume_cannot_be_bound(vm: machine.Machine, plug: MountDisk) -> None:
    volume = await plug("ext4")
    with pytest.raises(faults.GuestNotFound, match="not mounted"):
        await attempt(vm, "true", values.Bind(volume, "/data"))


@pytest.mark.parametrize("destination", ["/", "relative", "/a/../b"])
async def test_a_destination_that_is_no_plain_absolute_path_is_refused(
    vm: machine.Machine, mounted: MountDisk, destination: str
) -> None:
    volume = await mounted()
    with pytest.raises(faults.GuestBadRequest):
        await attempt(vm, "true", values.Bind(volume, destination))
