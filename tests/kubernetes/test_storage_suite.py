"""Kubernetes' own external storage suite for our driver: what one node can run of it."""

import json
import subprocess
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.daemons import PROGRAMS

pytestmark = pytest.mark.timeout(1500)
DRIVER = {
    "StorageClass": {"FromExistingClassName": "crust-xfs"},
    "SnapshotClass": {"FromExistingClassName": "crust"},
    "DriverInfo": {
        "Name": "block.csi.crust.dev",
        "SupportedFsType": {"": {}},
        "SupportedSizeRange": {"Min": "320Mi"},
        "SupportedMountOption": {"noatime": {}},
        "RequiredAccessModes": ["ReadWriteOnce"],
        "TopologyKeys": ["crust.dev/node"],
        "Capabilities": dict.fromkeys(
            (
                "persistence", "block", "exec", "fsGroup", "volumeMountGroup", "snapshotDataSource", "pvcDataSource",
                "controllerExpansion", "nodeExpansion", "onlineExpansion", "offlineExpansion", "topology",
                "singleNodeVolume", "multipods", "readWriteOncePod", "capReadOnlyMany", "capacity",
            ),
            True,
        ),
    },
}  # fmt: skip
PARTS = (
    r"Dynamic PV \(default fs\).*provisioning .*snapshot",
    r"Dynamic PV \(default fs\).*provisioning .*(pvc data source|mount)",
    r"Dynamic PV \(default fs\).*(volume-expand|capacity)",
    r"Dynamic PV \(default fs\).*(volumes |volumeIO|read-write-once-pod)",
    r"Dynamic PV \((block volmode|delayed binding|filesystem volmode)\).*(volumes |volumeMode|topology)",
    r"Dynamic Snapshot",
)
"""Of the suite; they run at once, since each waits most of the time."""
PASSED = 20
SKIP = "Disruptive|Slow|Serial|SELinux"
OF_MANY = (
    r"Dynamic PV \(default fs\).*(subPath|fsgroupchangepolicy)",
    r"Dynamic PV \(filesystem volmode\).*multiVolume",
    r"Dynamic PV \(block volmode\).*multiVolume",
    r"Generic Ephemeral-volume \(default fs\) \(late-binding\).*ephemeral",
)
"""Pods with many volumes, paths in a volume, and volumes of a pod's own: the suite marks most of them Slow."""
SKIP_OF_MANY = "Disruptive|Serial|SELinux"


def passed(cluster: Cluster, directory: Path, parts: Sequence[str], skip: str) -> list[str]:
    """The cases that passed of these parts; none failed, and none left a volume."""
    driver = directory / "driver.json"
    driver.write_text(json.dumps(DRIVER), encoding="utf-8")
    reports = [directory / f"{number}.xml" for number in range(len(parts))]
    command = (
        PROGRAMS / "e2e.test", f"-kubeconfig={cluster.kubectl.kubeconfig}", "-provider=local", "-num-nodes=1",
        "-prepull-images=false", f"-kubectl-path={PROGRAMS / 'kubectl'}", f"-storage.testdriver={driver}",
        f"-ginkgo.skip={skip}", "-ginkgo.no-color",
    )  # fmt: skip
    with ExitStack() as running:
        for part, report in zip(parts, reports, strict=True):
            chosen = (f"-ginkgo.focus=External.Storage.*{part}", f"-ginkgo.junit-report={report}")
            log = running.enter_context(report.with_suffix(".log").open("wb"))
            running.enter_context(subprocess.Popen([*command, *chosen], stdout=log, stderr=log))
    cases = [case for report in reports for case in xml.parse(report).iter("testcase")]
    ended = [(str(case.get("name")), case.get("status")) for case in cases]
    assert [each for each in ended if each[1] not in ("passed", "skipped")] == []
    assert list(cluster.node.images_of_volumes()) == []
    return [name for name, status in ended if status == "passed" and "[It]" in name]


def test_external_storage_suite_passes_for_the_driver(cluster: Cluster, tmp_path: Path) -> None:
    assert len(passed(cluster, tmp_path, PARTS, SKIP)) == PASSED


@pytest.mark.timeout(3600)
def test_external_suite_of_paths_and_many_volumes_passes(cluster: Cluster, tmp_path: Path) -> None:
    names = passed(cluster, tmp_path, OF_MANY, SKIP_OF_MANY)
    assert all(
        any(each in name for name in names) for each in ("subPath", "multiVolume", "ephemeral")
    )
