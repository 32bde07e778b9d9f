"""Entries of the list about processes that are killed, and a node that starts again."""

import asyncio
import dataclasses

import grpc

from tests.support.co import capability
from tests.support.faults.refusals import refused, until_probe
from tests.support.forms.form import ANSWER_S, TARGET, Form, Volume, staged

FAILED = """
truncate -s 320M /tmp/failed.img; mkfs.xfs -q /tmp/failed.img; mount -o loop /tmp/failed.img /mnt; rm /tmp/failed.img
exec 3>/mnt/file
python3 -c 'import fcntl, os; fcntl.ioctl(os.open("/mnt", os.O_RDONLY), 0x8004587D, b"\\2\\0\\0\\0")'
echo failed; read end
"""
"""XFS_IOC_GOINGDOWN: from then on xfs answers EIO, as after an error of its disk."""


async def kill_of_each_process(form: Form) -> None:
    """A guest keeps its volume, and the next process of crust knows it."""
    async with staged(form) as volume:
        await volume.publish()
        with form.sandbox() as device:
            for process in form.processes:
                form.kill(process)
                await until_probe(volume.co.channel, grpc.StatusCode.OK, within_s=ANSWER_S)
                async with form.called():
                    pass
                assert form.is_mounted()  # the guard mount
                await refused(
                    volume.unpublish(), grpc.StatusCode.FAILED_PRECONDITION, "HeldBySandbox"
                )
            assert form.run("findmnt", "--source", device).returncode == 1
        await volume.unpublish()
        assert not form.is_mounted(TARGET)


async def failed_filesystem_beside(form: Form) -> None:
    """A process that has a file of a failed filesystem open is in nobody's way."""
    async with staged(form) as volume:
        with form.running("env", "--chdir=/", "unshare", "--mount", "sh", "-ec", FAILED) as process:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line == "failed\n", line
            await volume.publish()
            with form.sandbox():
                pass
            await volume.unpublish()


async def reboot(form: Form) -> None:
    """The kubelet ends what its old pods had, and a new one has the data, in a guest and on the host."""
    async with form.called() as co, form.handler():
        created = await co.create("v")
        volume = Volume(co, created, capability(), form.driver, form.secrets)
        form.left = volume
        await volume.stage()
        await volume.publish(defer=False)
        form.output("sh", "-ec", f"echo written >{TARGET}/file; sync {TARGET}/file")
        await volume.unpublish()
        await volume.publish()
    await asyncio.to_thread(form.reboot)
    async with form.called() as co, form.handler():
        volume = dataclasses.replace(volume, co=co)
        form.left = volume
        form.output("rmdir", TARGET)  # as a kubelet does for a pod that it has forgotten
        await volume.unpublish()
        await volume.unstage()
        await volume.stage()
        await volume.publish()
        with form.sandbox() as device:
            assert "ext4" in form.output("blkid", "-p", device)
        await volume.unpublish()
        await volume.publish(defer=False)
        assert form.output("cat", f"{TARGET}/file") == "written\n"
        await volume.unpublish()
        await volume.unstage()
        await co.delete(volume.id)
        form.left = None
