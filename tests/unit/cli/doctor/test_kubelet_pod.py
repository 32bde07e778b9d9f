"""`crust doctor` in a pod: whether the settings fit the pod that they are in."""

from dataclasses import replace
from pathlib import Path

import pytest

from crust.cli.doctor.node import Level, Node
from tests.support import chart
from tests.support.nodes.examined_node import bad, found, write

MOUNTS = """\
1 0 0:30 / / ro,relatime - overlay overlay ro
2 1 0:24 /crust /run/crust rw shared:1 - tmpfs tmpfs rw
3 1 8:1 /var/lib/kubelet /var/lib/kubelet rw shared:2 - ext4 /dev/sda1 rw
4 1 8:1 /var/lib/crust /var/lib/crust rw master:3 - ext4 /dev/sda1 rw
"""
SETTINGS = chart.settings(chart.objects())


@pytest.fixture
def pod(good: Node) -> Node:
    """A pod of the chart."""
    write(good.root, "etc/crust/node.toml", SETTINGS)
    write(good.root, "proc/self/mountinfo", MOUNTS)
    return replace(good, is_pod=True)


def test_settings_of_the_chart_fit_its_pod(pod: Node) -> None:
    assert {finding.level for finding in found(pod, "pod")} == {Level.OK}
    (only,) = found(replace(pod, is_pod=False), "pod")
    assert (only.level, "does not run in a pod" in only.what) == (Level.OK, True)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"0.0.0.0:9810"', '"127.0.0.1:9810"', "metrics_address"),
        ("[[driver]]", '[[driver]]\nnode_id = "other"', "leave driver.node_id out"),
        (
            "[[proxy.drivers]]",
            '[proxy.kubernetes]\nruntime_handlers = ["kata"]\nnode_name = "other"\n[[proxy.drivers]]',
            "leave proxy.kubernetes.node_name out",
        ),
        ('state_dir = "/var/lib/crust/block"', 'state_dir = "/mnt/pool"', "/mnt/pool is the pod's"),
        ("[[driver]]", '[[driver]]\npool_id_file = "/mnt/id"', "/mnt/id is the pod's own"),
        ('run_dir = "/run/crust"', 'run_dir = "/srv/crust"', "/srv/crust is the pod's own"),
    ],
)
def test_settings_that_lose_something_with_pod_are_errors(
    pod: Node, before: str, after: str, words: str
) -> None:
    text = (pod.root / "etc/crust/node.toml").read_text()
    assert before in text
    write(pod.root, "etc/crust/node.toml", text.replace(before, after, 1))
    assert words in bad(pod, "pod", Level.ERROR)


def test_path_on_empty_dir_is_error(pod: Node) -> None:
    empty = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/pool"
    mounts = MOUNTS.replace("8:1 /var/lib/crust /var", f"8:1 {empty} /var")
    write(pod.root, "proc/self/mountinfo", mounts)
    assert "/var/lib/crust/block is the pod's own" in bad(pod, "pod", Level.ERROR)


OF_HOST = ("filesystems", "kata", "kata-engine", "lvm", "multipath", "udev")


@pytest.mark.parametrize("check", OF_HOST)
def test_check_of_the_host_is_never_ok_unseen(pod: Node, check: str) -> None:
    """The image has no LVM, no udev and no modules, whatever the host has."""
    (only,) = found(pod, check)
    assert only.level is Level.ERROR
    assert "cannot be seen from a pod" in only.why
    assert "hostPID" in only.todo


def test_check_in_pod_looks_at_the_files_of_the_host(pod: Node, tmp_path: Path) -> None:
    seen = replace(pod, host_root=tmp_path / "host")
    write(tmp_path / "host", "usr/sbin/lvm")
    text = bad(seen, "lvm", Level.WARNING)
    assert "every device" in text
    assert "host/lvm.conf of the container into /etc/lvm/lvm.conf" in text
    write(tmp_path / "host", "etc/lvm/lvm.conf", "global_filter = []\n")
    assert [finding.what for finding in found(seen, "lvm")] == ["LVM has a filter"]
