"""Entries of the list with real guests: the example runtime on the node, and the microVMs that it starts."""

import os
import select
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from crust.core import volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.wire.csi.v1 import csi_pb2
from tests.support.booted_systemd import CHECKOUT
from tests.support.co import MIB, capability
from tests.support.forms.form import TARGET, Form, Volume, staged

_RUNTIME = ("env", f"--chdir={CHECKOUT}", f"{CHECKOUT}/.venv/bin/python", "-m", "examples.kata")
_HERE = "--run-dir=/run/crust/example"
"""The proxy, in its pod, sees the handler's socket there."""
WRITE = "echo written >/data/file; sync; cat /data/file"
READ = "cat /data/file"
WRITE_ON = f"{WRITE}; while echo more >>/data/more && sync; do echo more; done"
SMALL, LARGE = 320 * MIB, 400 * MIB


async def guests(form: Form) -> None:
    """A guest mounts the volume and writes to it; another guest reads it; the host mounts it at no time."""
    await _write_and_read(form, capability())


async def guests_of_xfs(form: Form) -> None:
    """The same with another filesystem."""
    await _write_and_read(form, capability("xfs"))


async def _write_and_read(form: Form, given: csi_pb2.VolumeCapability) -> None:
    async with staged(form, given, runtime=runtime(form), size=SMALL) as volume:
        await volume.publish()
        for script in (WRITE, READ):
            with guest(form, script):
                _check_not_on_host(form, given.mount.fs_type)
        await volume.unpublish()
        assert not form.is_mounted()


def _check_not_on_host(form: Form, fs_type: str) -> None:
    record = _record(form)
    if record.image is not None:  # only the hypervisor has it
        return
    assert record.device.startswith("/dev/loop")
    assert fs_type in form.output("blkid", "-p", record.device)
    assert form.run("findmnt", "--source", record.device).returncode == 1


async def killed_guest(form: Form) -> None:
    """A microVM is killed while it writes: after another stage the next one has all that was on the disk by then."""
    async with staged(form, runtime=runtime(form)) as volume:
        await volume.publish()
        with guest(form, WRITE_ON, is_killed=True):
            pass
        assert form.needs_recovery(_record(form))
        await volume.unpublish()
        await volume.unstage()
        await volume.stage()
        await volume.publish()
        with guest(form, READ):
            pass
        assert not form.needs_recovery(_record(form))
        await volume.unpublish()


async def statistics_and_growth(form: Form) -> None:
    """The numbers are those of the guest's filesystem, which the guest grows while it has it mounted."""
    async with staged(form, runtime=runtime(form), size=SMALL) as volume:
        await volume.publish()
        with guest(form):
            before = await _total(volume)
            assert MIB < before <= SMALL
            await volume.grow(LARGE)
            assert await _total(volume) > before
        await volume.unpublish()


async def _total(volume: Volume) -> int:
    usage = (await volume.co.stats(volume.id, TARGET)).usage
    (total,) = (each.total for each in usage if each.unit == csi_pb2.VolumeUsage.BYTES)
    return total


async def group_in_guest(form: Form) -> None:
    """A pod with fsGroup gets in its guest the files of a pod without."""
    async with staged(form, runtime=runtime(form)) as volume:
        await volume.publish()
        with guest(form, f"{WRITE} && chmod 600 /data/file"):
            pass
        await volume.unpublish()
        await volume.publish(given=capability(volume_supplemental_group="3000"))
        with guest(form, f"test $(stat -c %g:%a /data/file) = 3000:660 && {READ}"):
            pass
        await volume.unpublish()


async def snapshot_and_clone(form: Form) -> None:
    """A volume of a snapshot that was made under a guest, and a clone, have in a guest the file of their source."""
    async with staged(form, runtime=runtime(form)) as volume:
        await volume.publish()
        with guest(form):
            snapshot = await volume.co.snapshot(volume.id)
        await volume.unpublish()
        await volume.unstage()
        for source in ({"snapshot": snapshot.snapshot_id}, {"volume": volume.id}):
            copy = await volume.copy(**source)
            await copy.stage()
            await copy.publish()
            with guest(form, READ):
                pass
            await copy.remove()
        await volume.co.delete_snapshot(snapshot.snapshot_id)


def _record(form: Form) -> Record:
    entry = Store(form.seen("/run/crust/volumes")).read(volumes.TargetPath(TARGET))
    assert entry is not None
    return entry.require()


@asynccontextmanager
async def runtime(form: Form) -> AsyncIterator[None]:
    """The example runtime serves as the handler kata, and is registered when the block begins; its end kills it."""
    with form.running(*_RUNTIME, "serve", _HERE):
        await form.until_registered()
        yield


@contextmanager
def guest(
    form: Form, script: str = WRITE, target: str = TARGET, *, is_killed: bool = False
) -> Iterator["subprocess.Popen[str]"]:
    """A microVM that has the volume, and whose script has printed "written" when the block begins; it ends then."""
    of_guest = ("--sandbox=guest", f"--mount=source={target},destination=/data")
    command = (*_RUNTIME, "run", _HERE, *of_guest, "sh", "-c", f"{script}; exec sleep infinity")
    with form.running(*command) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line == "written\n", line + running.stdout.read()
        yield running
        if is_killed:
            _, _, pid, *_ = form.output(*_RUNTIME, "ps", _HERE).split()
            form.output("kill", "-KILL", pid)
            running.wait(60)
        form.output(*_RUNTIME, "stop", _HERE, "guest")


def writes_on(running: "subprocess.Popen[str]") -> bool:
    """Whether the guest of `WRITE_ON` lives; waits until it has written more than it has printed so far. Blocks."""
    assert running.stdout is not None
    printed = running.stdout.fileno()
    while select.select([printed], [], [], 0)[0]:
        if not os.read(printed, 1 << 16):
            return False
    return bool(os.read(printed, 1))
