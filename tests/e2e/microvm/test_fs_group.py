"""fsGroup inside the guest: the kubelet's modes, both policies, and a tree with hostile links."""

import pytest

from examples.kata.vm import faults, machine, values
from tests.e2e.microvm.conftest import MountDisk, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

_GROUP = 4242
_TREE = """
mkdir -p /data/sub/deep; echo a > /data/sub/deep/file; chmod 600 /data/sub/deep/file
echo s > /data/program; chmod 4711 /data/program
ln -s /data/program /data/link; ln -s /etc /data/etc; ln -s ../../../../run /data/up; ln -s loop /data/loop
"""
_LIST = "cd /data; stat -c '%g %a %n' . sub sub/deep sub/deep/file program link etc up loop"


async def _prepared(vm: machine.Machine, plug: MountDisk) -> str:
    volume = await plug("ext4")
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    await shell(vm, _TREE, values.Bind(volume, "/data"))
    await vm.guest.unmount(volume)
    return volume


async def _owned(
    vm: machine.Machine, volume: str, group: values.FsGroup
) -> tuple[int, dict[str, tuple[int, str]]]:
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    owned = await vm.guest.own(volume, group)
    listing = await shell(vm, _LIST, values.Bind(volume, "/data"))
    await vm.guest.unmount(volume)
    rows = (line.split(" ", 2) for line in listing.splitlines())
    return owned.owned_entries, {name: (int(gid), mode) for gid, mode, name in rows}


async def test_always_policy_applies_group_and_kubelet_modes_to_the_whole_tree(
    vm: machine.Machine, plug: MountDisk
) -> None:
    volume = await _prepared(vm, plug)
    visited, owned = await _owned(vm, volume, values.FsGroup(_GROUP, "Always"))
    assert owned == {
        ".": (_GROUP, "2775"),
        "sub": (_GROUP, "2775"),
        "sub/deep": (_GROUP, "2775"),
        "sub/deep/file": (_GROUP, "660"),
        "program": (_GROUP, "4771"),
        "link": (_GROUP, "777"),
        "etc": (_GROUP, "777"),
        "up": (_GROUP, "777"),
        "loop": (_GROUP, "777"),
    }
    assert visited == len(owned) + 1  # lost+found


async def test_fs_group_stays_in_the_volume(vm: machine.Machine, plug: MountDisk) -> None:
    """The links of the tree point at /etc and /run of the guest, as its agent sees them."""
    volume = await _prepared(vm, plug)
    look = "stat -c '%g %a %n' /etc /etc/passwd /run /usr/bin/python3.11"
    before = await shell(vm, look)
    await _owned(vm, volume, values.FsGroup(_GROUP, "Always"))
    assert await shell(vm, look) == before


async def test_on_root_mismatch_checks_only_the_root(vm: machine.Machine, plug: MountDisk) -> None:
    volume = await _prepared(vm, plug)
    group = values.FsGroup(_GROUP, "OnRootMismatch")
    first, owned = await _owned(vm, volume, group)
    assert first > 0
    assert owned["sub/deep/file"] == (_GROUP, "660")
    assert (await _owned(vm, volume, group))[0] == 0
    # Another group, or a root that lost its set-gid bit, is a mismatch.
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    await shell(vm, "chmod 0775 /data; chgrp 0 /data/program", values.Bind(volume, "/data"))
    await vm.guest.unmount(volume)
    again, owned = await _owned(vm, volume, group)
    assert again == first
    assert owned["program"] == (_GROUP, "771")  # the test's own chgrp cleared the set-user-id bit


async def test_group_member_alone_may_write(vm: machine.Machine, plug: MountDisk) -> None:
    volume = await plug("ext4")
    await vm.guest.mount(values.VolumeMount(volume, "ext4"))
    await vm.guest.own(volume, values.FsGroup(_GROUP))
    bind = values.Bind(volume, "/data")
    script = "touch /data/mine && stat -c %g /data/mine"
    assert await shell(vm, script, bind, uid=1000, groups=(_GROUP,)) == f"{_GROUP}\n"
    assert await shell(vm, "touch /data/other || echo no", bind, uid=1001) == "no\n"


async def test_an_unknown_policy_is_refused(vm: machine.Machine, mounted: MountDisk) -> None:
    group = values.FsGroup(_GROUP, "Sometimes")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(faults.GuestBadRequest, match="Sometimes"):
        await vm.guest.own(await mounted(), group)


async def test_fs_group_waits_for_a_thaw_and_ends_with_an_unmount(
    vm: machine.Machine, mounted: MountDisk
) -> None:
    """It is a step of its own: meanwhile the volume answers, thaws, and can be unmounted."""
    volume = await mounted()
    make = "import os\nfor n in range(2000): os.mkdir(f'/data/{n}')"
    spec = values.ContainerSpec("tree", ("python3", "-c", make), (values.Bind(volume, "/data"),))
    assert (await vm.guest.run(spec)).exit.code == 0
    await vm.guest.freeze(volume, 60)
    group = values.FsGroup(_GROUP, "Always")
    assert await vm.guest.progress(volume, group) == values.Owned(done=False, owned_entries=0)
    assert (await vm.guest.usage(volume)).used_inodes > 2000
    assert not (await vm.guest.health(volume)).abnormal
    assert await vm.guest.thaw(volume)
    assert await vm.guest.own(volume, group) == values.Owned(done=True, owned_entries=2002)
    await vm.guest.progress(volume, values.FsGroup(_GROUP + 1, "Always"))
    assert await vm.guest.unmount(volume)
