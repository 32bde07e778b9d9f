"""Entries of the list about the kinds of volumes that crust's driver has, and what is done to them.

A filesystem of the host is one that the node itself mounts. Where a guest would act, its handler answers with
numbers.
"""

from typing import Any

import grpc

from crust.core.settings import OWN_DRIVER
from crust.core.volumes import HandlerFeature
from tests.support.co import MIB, capability
from tests.support.faults.refusals import refused
from tests.support.forms.form import (
    NO_FORMAT,
    STAGING,
    TARGET,
    Form,
    staged,
)

GROUP = 3000
OF_ANOTHER_USER = f"""
mkdir {TARGET}/d; echo written >{TARGET}/d/f; chmod 0600 {TARGET}/d/f; chown --recursive 1000:1000 {TARGET}/d
"""
SECRETS = {"passphrase": "correct horse battery staple"}
ENCRYPTED = {"crust.dev/encryption": "luks"}
POOLS = "/var/lib/crust"
SMALL, LARGE = 320 * MIB, 400 * MIB


async def xfs(form: Form) -> None:
    """Another filesystem, in a guest and on the host."""
    await _other_filesystem(form, "xfs")


async def btrfs(form: Form) -> None:
    """The third one."""
    await _other_filesystem(form, "btrfs")


async def _other_filesystem(form: Form, fs_type: str) -> None:
    async with staged(form, capability(fs_type), size=SMALL) as volume:
        await volume.publish()
        with form.sandbox() as device:
            assert fs_type in form.output("blkid", "-p", device)
        await volume.unpublish()
        await volume.publish(defer=False)
        assert fs_type in form.output("findmnt", TARGET)
        if volume.driver == OWN_DRIVER:  # the smallest driver has no numbers
            assert (await volume.co.stats(volume.id, TARGET)).usage
        await volume.unpublish()


async def thick(form: Form) -> None:
    """A volume of a thick class has all of its blocks, and keeps them; on an overlay it is refused by name."""
    fields: dict[str, Any] = {"size": SMALL, "parameters": {"crust.dev/provisioning": "thick"}}
    if form.output("stat", "--file-system", "--format=%T", POOLS) == "overlayfs\n":
        async with form.called() as co:
            call = co.create("v", **fields)
            await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "ThickNotPossible")
        return
    async with staged(form, **fields) as volume:
        await volume.publish(defer=False)
        form.output(
            "sh", "-ec", f"dd if=/dev/zero of={TARGET}/f bs=1M count=8; rm {TARGET}/f; sync"
        )
        assert form.run("fstrim", TARGET).returncode != 0, "its blocks are not given back"
        sectors = form.output("find", POOLS, "-name", f"{volume.id}.img", "-printf", "%b")
        assert int(sectors) * 512 >= SMALL
        await volume.unpublish()


async def raw(form: Form) -> None:
    """A pod writes to a raw block volume."""
    async with staged(form, capability(block=True)) as volume:
        await volume.publish(defer=False)
        form.output("dd", "if=/dev/zero", f"of={TARGET}", "bs=4k", "count=1", "oflag=direct")
        await volume.unpublish()
        form.output("rm", "-f", TARGET)  # as a kubelet does


async def growth_on_host(form: Form) -> None:
    """A mounted filesystem grows with its device."""
    async with staged(form, capability("xfs"), size=SMALL) as volume:
        await volume.publish(defer=False)
        await volume.grow(LARGE)
        kib = form.output("df", "--output=size", TARGET).split()[-1]
        assert int(kib) * 1024 > SMALL
        await volume.unpublish()


async def growth_in_guest(form: Form) -> None:
    """A guest grows its filesystem where its runtime offers GROW."""
    async with staged(form, size=SMALL) as volume:
        await volume.publish()
        with form.sandbox() as device:
            await volume.grow(LARGE)
            assert int(form.output("blockdev", "--getsize64", device)) >= LARGE
        await volume.unpublish()


async def growth_without_runtimes_help(form: Form) -> None:
    """Without GROW the call says that the filesystem stays, and a publish on the host grows it."""
    async with staged(form, size=SMALL, features=NO_FORMAT - {HandlerFeature.GROW}) as volume:
        await volume.publish()
        with form.sandbox():
            words = "FilesystemNotGrown"
            await refused(volume.grow(LARGE), grpc.StatusCode.FAILED_PRECONDITION, words)
        await volume.unpublish()


async def group_of_pod(form: Form) -> None:
    """A pod with fsGroup gets the files of a pod without."""
    async with staged(form) as volume:
        await volume.publish(defer=False)
        form.output("sh", "-ec", OF_ANOTHER_USER)
        await volume.unpublish()
        grouped = capability(volume_mount_group=str(GROUP))
        await volume.publish(defer=False, given=grouped)
        seen = form.output("stat", "--format=%u:%g %a", f"{TARGET}/d", f"{TARGET}/d/f")
        assert seen.splitlines() == [f"1000:{GROUP} 2775", f"1000:{GROUP} 660"], seen
        await volume.unpublish()


async def snapshot_and_clone(form: Form) -> None:
    """A volume of a snapshot, and a clone, have the file of their source."""
    async with staged(form) as volume:
        await volume.publish(defer=False)
        form.output("sh", "-ec", f"echo written >{TARGET}/file; sync {TARGET}/file")
        await volume.unpublish()
        await volume.unstage()
        snapshot = await volume.co.snapshot(volume.id)
        for source in ({"snapshot": snapshot.snapshot_id}, {"volume": volume.id}):
            copy = await volume.copy(**source)
            await copy.stage()
            await copy.publish(defer=False)
            assert form.output("cat", f"{TARGET}/file") == "written\n"
            await copy.remove()
        await volume.co.delete_snapshot(snapshot.snapshot_id)


async def luks(form: Form) -> None:
    """An encrypted volume goes to a guest alone, and its passphrase to no file."""
    every = frozenset(HandlerFeature)
    async with staged(form, features=every, secrets=SECRETS, parameters=ENCRYPTED) as volume:
        on_host = volume.publish(defer=False)
        await refused(on_host, grpc.StatusCode.FAILED_PRECONDITION, "EncryptedOnHost")
        await volume.publish()
        with form.sandbox() as device:
            assert form.run("blkid", "-p", device).returncode == 2  # blank: the guest makes it
        found = form.run("grep", "--recursive", "--files-with-matches", SECRETS["passphrase"],
                         "/run/crust", "/var/lib/crust")  # fmt: skip
        assert (found.returncode, found.stdout) == (1, ""), found
        await volume.unpublish()


async def luks_refused(form: Form) -> None:
    """Neither a runtime without LUKS nor the host gets an encrypted volume."""
    async with staged(form, secrets=SECRETS, parameters=ENCRYPTED) as volume:
        for defer, name in ((True, "UnsupportedByHandler"), (False, "EncryptedOnHost")):
            published = volume.publish(defer=defer)
            await refused(published, grpc.StatusCode.FAILED_PRECONDITION, name)
        assert not form.is_mounted()


async def statistics(form: Form) -> None:
    """The numbers of a guest while a sandbox has the volume, else none of the guard mount."""
    async with staged(form) as volume:
        await volume.publish()
        with form.sandbox():
            (usage,) = (await volume.co.stats(volume.id, TARGET)).usage
            assert (usage.total, usage.used) == (1000, 400)
            assert usage.available <= 500  # of Kata's: less the blocks that are reserved for root
        await volume.unpublish()
        if volume.driver != OWN_DRIVER:  # the smallest driver has none
            return
        await volume.publish(defer=False)
        usages = (await volume.co.stats(volume.id, TARGET, staging_target_path=STAGING)).usage
        assert max(usage.total for usage in usages) > MIB
        await volume.unpublish()
