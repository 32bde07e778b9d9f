"""The list of what a node must be able to do, in every form in which crust is shipped.

Each entry is a function over a form (`tests.support.forms.form`), and leaves nothing on the node. With
`TESTS_FORMS=all` (`make forms`) every form runs the whole list, else the entries of `IN_EVERY_RUN`.
"""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from crust.core.settings import OWN_DRIVER
from crust.rpc import channel
from examples.drivers import minimal
from tests.support.co import Co
from tests.support.faults.refusals import refused, repeated
from tests.support.forms import of_faults, of_guests, of_operators, of_volumes
from tests.support.forms.form import ANSWER_S, KUBELET, TARGET, Form, Volume, staged

Entry = Callable[[Form], Awaitable[None]]
BESIDE_GUARD = f"""
mount --bind {KUBELET} /mnt && mount --make-private /mnt || exit 9
trap 'umount /mnt || exit 9' EXIT
below=/mnt/{Path(TARGET).relative_to(KUBELET)}
test -d $below || exit 9
touch $below/file
"""
"""A `hostPath` of a directory above, as a microVM gets it: without the mounts in it."""
KILLED = """
mount {device} /mnt; echo written >/mnt/file; sync
python3 -c 'import fcntl, os; fcntl.ioctl(os.open("/mnt", os.O_RDONLY), 0x8004587D, b"\\2\\0\\0\\0")'
umount /mnt; dumpe2fs -h {device}
"""
"""A guest that writes and is killed: EXT4_IOC_SHUTDOWN (fs/ext4/ext4.h) drops all that is not on the disk by then."""
POOL, AWAY = "/var/lib/crust/block", "/var/lib/crust/away"
READ = "mount {device} /mnt; cat /mnt/file; umount /mnt"
"""Another guest."""


async def deferred_publish_and_unpublish(form: Form) -> None:
    """A guest has the device, the host has no mount of it, and the unpublish removes the guard mount."""
    await _defer(form, form.driver)


async def dirty_ext4(form: Form) -> None:
    """e2fsck replays the journal, confined, before another guest or the host has the volume of a killed guest."""
    await _leave_dirty(form, form.driver)


async def wrapped_driver(form: Form) -> None:
    """The same two for the volumes of a driver that knows nothing of deferral; the kernel replays their journal."""
    with form.vendors_driver():
        await _defer(form, minimal.NAME)
        await _leave_dirty(form, minimal.NAME)


async def absent_pool(form: Form) -> None:
    """A node that starts without its pool refuses the calls for that; a driver beside it serves its own volumes."""
    async with form.called():  # the pool exists
        form.output("mv", POOL, AWAY)
    try:
        for process in form.processes:
            form.kill(process)
        async with channel.connect(form.socket(form.driver)) as connected:
            co = Co(connected, ANSWER_S, waits=True)
            created = repeated(lambda: co.create("v"), while_named="NotServedYet")
            await refused(created, grpc.StatusCode.UNAVAILABLE, "PoolAbsent")
        with form.vendors_driver():
            await _defer(form, minimal.NAME)
    finally:
        form.output("mv", AWAY, POOL)
        async with form.called():
            pass


async def _defer(form: Form, driver: str) -> None:
    async with staged(form, driver=driver) as volume:
        await volume.publish()
        assert form.run("sh", "-c", BESIDE_GUARD).returncode == 1
        with form.sandbox() as device:
            assert device.startswith("/dev/loop")
            assert "ext4" in form.output("blkid", "-p", device)
            assert form.run("findmnt", "--source", device).returncode == 1  # not on the host
        await volume.unpublish()
        assert not form.is_mounted()


async def _leave_dirty(form: Form, driver: str) -> None:
    async with staged(form, driver=driver) as volume:
        await _kill_guest(form, volume)
        await volume.publish()
        with form.sandbox() as device:
            is_dirty = "needs_recovery" in form.output("dumpe2fs", "-h", device)
            assert not (is_dirty and driver == OWN_DRIVER)
        assert (
            form.output("unshare", "--mount", "sh", "-ec", READ.format(device=device))
            == "written\n"
        )
        await volume.unpublish()
        await _kill_guest(form, volume)
        await volume.publish(defer=False)
        assert form.output("cat", f"{TARGET}/file") == "written\n"
        await volume.unpublish()


async def _kill_guest(form: Form, volume: Volume) -> None:
    """A guest has the volume and is killed; then the CO unpublishes and unstages the volume, and stages it again."""
    await volume.publish()
    with form.sandbox() as device:
        pass  # its hold would refuse the mount that stands for the guest's
    killed = form.output("unshare", "--mount", "sh", "-ec", KILLED.format(device=device))
    assert "needs_recovery" in killed
    await volume.unpublish()
    await volume.unstage()
    await volume.stage()


IN_EVERY_RUN: tuple[Entry, ...] = (deferred_publish_and_unpublish, dirty_ext4)
OF_OPERATION: tuple[Entry, ...] = (
    of_operators.doctor,
    of_operators.bundle,
    of_operators.gc,
    of_operators.end_orphan,
    of_faults.kill_of_each_process,
    of_faults.failed_filesystem_beside,
)
OF_ANY_DRIVER: tuple[Entry, ...] = (
    *IN_EVERY_RUN,
    *OF_OPERATION,
    of_faults.reboot,
    of_guests.guests,
    of_guests.killed_guest,
    of_guests.group_in_guest,
    of_volumes.xfs,
    of_volumes.raw,
    of_volumes.statistics,
)
"""What also a node does that serves no driver of crust, with the smallest one, which neither grows nor copies volumes
(examples/drivers/stateful.py does: tests/integration/wrap).
"""
WHOLE: tuple[Entry, ...] = (
    *OF_ANY_DRIVER,
    of_volumes.btrfs,
    of_volumes.thick,
    of_volumes.growth_on_host,
    of_volumes.growth_in_guest,
    of_guests.statistics_and_growth,
    of_volumes.growth_without_runtimes_help,
    of_volumes.group_of_pod,
    of_volumes.snapshot_and_clone,
    of_volumes.luks,
    wrapped_driver,
    absent_pool,
)

OF_KATA: tuple[Entry, ...] = (
    *IN_EVERY_RUN,
    *OF_OPERATION,
    of_volumes.xfs,
    of_volumes.raw,
    of_volumes.growth_without_runtimes_help,
    of_volumes.group_of_pod,
    of_volumes.snapshot_and_clone,
    of_volumes.luks_refused,
    of_volumes.statistics,
    wrapped_driver,
    of_faults.reboot,
)
"""All but what Kata does not offer (GROW, LUKS, btrfs: docs/kata.md), what it has no part in (thick, growth on the
host), and the guests, which need Kata itself: tests/real_kata.
"""

OF_CEPH: tuple[Entry, ...] = (
    of_guests.guests,
    of_guests.killed_guest,
    of_guests.guests_of_xfs,
    of_guests.statistics_and_growth,
    of_guests.group_in_guest,
    of_guests.snapshot_and_clone,
    *OF_OPERATION,
)
"""Of images, which a hypervisor opens itself: the first two are their `IN_EVERY_RUN`.

What the host would mount, or have as a raw device, needs a kernel with `rbd`, which tests/e2e/test_krbd.py has.
"""


def chosen(whole: tuple[Entry, ...] = WHOLE) -> tuple[Entry, ...]:
    """The entries of this run, of those that a form has."""
    if os.environ.get("TESTS_FORMS") == "all":
        return whole
    return whole[: len(IN_EVERY_RUN)]


def name(entry: Entry) -> str:
    """As the test's id has it."""
    return entry.__name__
