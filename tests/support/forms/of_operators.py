"""Entries of the list about commands of an operator: what they show and do beside a volume, in every form."""

import json
from contextlib import nullcontext

from crust.core.settings import OWN_DRIVER
from examples.drivers import minimal
from tests.support.forms.form import KUBELET, Form, staged

BUNDLE = "/run/crust/bundle.tar.gz"
"""A pod has that directory in common with its node."""
LOST = "[SandboxOrphaned] s is lost to its container engine"
OF_HOST = {"filesystems", "udev", "lvm", "multipath", "kata", "kata-engine"}
"""Checks of doctor that look at the host's own files."""
POD = "11111111-2222-3333-4444-555555555555"
FORGOTTEN = f"{KUBELET}/pods/{POD}/volumes/kubernetes.io~csi/pv/mount"


async def doctor(form: Form) -> None:
    """A node that serves, with a runtime, has no error, and of what a pod does not see none of the checks says ok."""
    async with form.handler():
        with form.vendors_driver() if form.driver == OWN_DRIVER else nullcontext():
            async with form.called(minimal.NAME if form.driver == OWN_DRIVER else ""):
                done = form.crust("doctor", "-o", "json")
    findings = json.loads(done.stdout)["findings"]
    assert findings
    blind = [
        each for each in findings if each["why"] and form.unseen and form.unseen in each["why"]
    ]
    wrong = [each for each in findings if each["level"] == "error" and each not in blind]
    assert wrong == [], wrong
    if blind:  # the other checks of the host's files
        sighted = {each["check"] for each in findings} - {each["check"] for each in blind}
        assert not OF_HOST & sighted, sighted


async def bundle(form: Form) -> None:
    """The archive has the answers of the daemons and of doctor."""
    async with staged(form) as volume:
        await volume.publish()
        done = form.crust("bundle", BUNDLE)
        assert done.returncode == 0, done
        names = form.output("tar", "--list", "--file", BUNDLE)
        assert {"bundle/status.json", "bundle/doctor.json"} <= set(names.split())
        assert "/mountInfo.json" in names
        form.output("rm", BUNDLE)
        await volume.unpublish()


async def gc(form: Form) -> None:
    """A publish that a kubelet forgot is shown; nothing is settled by what does not see all of the host."""
    async with staged(form) as volume:
        form.output("mkdir", "-p", FORGOTTEN.removesuffix("/mount"))
        await volume.publish(FORGOTTEN)
        assert form.crust("gc").returncode == 0
        form.output("umount", FORGOTTEN)
        form.output("chattr", "-i", FORGOTTEN)
        form.output("rm", "-r", f"{KUBELET}/pods/{POD}")
        done = form.crust("gc", "-o", "json")
        assert (done.returncode, volume.id in done.stdout) == (1, True), done
        assert "visibility" in done.stdout
        form.output("mkdir", "-p", FORGOTTEN)
        await volume.unpublish(FORGOTTEN)
        form.output("rm", "-r", f"{KUBELET}/pods/{POD}")


async def end_orphan(form: Form) -> None:
    """A virtual machine that is lost to its runtime is ended, and no other one."""
    async with staged(form) as volume:
        await volume.publish()
        with form.sandbox():
            kept = form.crust("end-orphan", volume.id, "--yes")
            assert (kept.returncode, "NotOrphaned" in kept.stderr) == (1, True), kept
        with form.sandbox(error=LOST):
            ended = form.crust("end-orphan", volume.id, "--yes")
            assert ended.returncode == 0, ended
        await volume.unpublish()
