"""`crust gc` of an environment on the node, beside the pod of the chart, as docs/operations.md says.

pip installs no package here: the environment has the wheel of this checkout, and links to what it depends on.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import chart, environments
from tests.support.co import MIB, capability
from tests.support.containers import Containerd
from tests.support.forms import pod
from tests.support.forms.form import KUBELET
from tests.support.forms.pod import Pod

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]

PYTHON = "/opt/crust/bin/python"
PROGRAM = """
from crust.cli import main
from crust.cli.gc import kernel

kernel.Kernel.not_visible = lambda self: ""
main.main(prog_name="crust")
"""
"""Tests have a mount namespace of their own, with all that they made in view."""
BASE, PV, POD = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices", "pv-raw", "0a1b2c3d-gone"
TARGET, MAPPED = f"{BASE}/publish/{PV}/{POD}", f"{BASE}/{PV}/dev/{POD}"
DATA, STAGING = f"{BASE}/{PV}/data/vol_data.json", f"{BASE}/staging/{PV}"


def gc(node: Pod, *flags: str) -> "subprocess.CompletedProcess[str]":
    return node.run(PYTHON, "-c", PROGRAM, "gc", *flags)


async def publish(node: Pod, volume_id: str) -> None:
    """Publish a raw volume as a kubelet does, which then forgets it: its pod has no directory."""
    for path in (TARGET, MAPPED, DATA, f"{STAGING}/x", f"{KUBELET}/pods/x"):
        node.output("mkdir", "-p", str(Path(path).parent))
    driver = {"driverName": node.driver, "volumeHandle": volume_id}
    node.at(DATA).write_text(json.dumps(driver), encoding="utf-8")
    async with node.called() as co:
        raw = capability(block=True)
        await co.stage(volume_id, STAGING, raw)
        await co.publish(volume_id, TARGET, raw, defer=False, staging=STAGING)
    node.output("touch", MAPPED)
    node.output("mount", "--bind", TARGET, MAPPED)
    node.output("losetup", "--find", MAPPED)
    node.output(
        "touch", "--date=@1000000000", DATA, *(str(Path(p).parent) for p in (TARGET, MAPPED))
    )


async def test_recipe_beside_pod_ends_forgotten_publish(
    containerd: Containerd, tmp_path: Path
) -> None:
    with pod.serving(containerd, chart.choice("local"), Pod) as node:
        environments.make(node.at("/opt/crust"), environments.build_wheel(tmp_path))
        async with node.called() as co:
            made = await co.create("raw", capability(block=True), size=16 * MIB)
        await publish(node, made.volume_id)
        within = node.crust("gc")
        assert (within.returncode, "says how beside pods" in within.stdout) == (1, True), within

        shown = gc(node, "--dry-run")
        assert (shown.returncode, made.volume_id in shown.stdout) == (0, True), shown
        done = gc(node)
        assert (done.returncode, "undone" in done.stdout) == (0, True), done
        assert not node.is_mounted(TARGET)
        assert not node.at(MAPPED).exists()
        async with node.called() as co:
            await co.delete(made.volume_id)
