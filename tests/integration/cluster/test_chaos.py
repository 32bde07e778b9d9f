"""Three nodes, two controllers and three members of etcd, each fault that there is once, and the checker's count.

The processes are real, the nodes are network namespaces, and the checker uses no code of crust. `make cluster-chaos`
is the long form, with Ceph.
"""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]

VOLUMES = 24
FAULTS = (
    "node cut off",
    "node driver killed",
    "node driver stopped",
    "local controller killed",
    "local controller stopped",
    "etcd: 2 of 3 members killed",
)


def test_no_volume_is_lost_doubled_or_orphaned_after_each_fault() -> None:
    """Volumes are created, used, snapshotted, grown, deleted meanwhile; what fails is repeated until it succeeds."""
    command = (
        *(sys.executable, "-m", "tests.support.cluster_chaos", "--without-ceph", "--each-fault"),
        *(f"--volumes={VOLUMES}", "--seconds=40", "--seed=5"),
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    counts = {what: int(n) for n, what in re.findall(r"^ *(\d+)  (.+)$", done.stdout, re.MULTILINE)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts["tasks that did not end"] == 0
    assert [each for each in FAULTS if not counts.get(each)] == []
    assert counts["volumes that must be there"] + counts["volumes that must be gone"] == VOLUMES
    assert counts["placements"] > 0
    assert counts["names in two places"] == 0
