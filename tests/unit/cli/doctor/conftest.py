"""A node on which every check is content."""

from pathlib import Path

import pytest

from crust.cli.doctor.node import Node
from tests.support.nodes.examined_node import DEPLOY, HEALTHY, RELEASE, write


@pytest.fixture
def good(root: Path) -> Node:
    """A node on which every check is content, as far as it can be."""
    write(root, "dev/loop-control")
    write(root, "proc/filesystems", "nodev\ttmpfs\n\text4\n\txfs\n\tbtrfs\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu io memory\n")
    write(root, "sys/fs/cgroup/cgroup.subtree_control", "io\n")
    for directory in (
        "sys/fs/cgroup/kubepods.slice", "var/lib/kubelet/pods", "var/lib/kubelet/plugins",
        "var/lib/kubelet/plugins_registry",
    ):  # fmt: skip
        (root / directory).mkdir(parents=True)
    for program in ("mkfs.ext4", "e2fsck", "mkfs.xfs", "mkfs.btrfs", "btrfs", "bwrap", "blkid"):
        write(root, f"usr/sbin/{program}").chmod(0o755)
    write(root, "usr/lib/x86_64-linux-gnu/libseccomp.so.2")
    for name in ("proxy", "shim", "driver", "node"):
        write(root, f"etc/crust/{name}.toml", (DEPLOY / "crust" / f"{name}.toml").read_text())
    return Node(
        root=root,
        release=RELEASE,
        version_of=lambda program: f"{program} version 5.10.0\n",
        proxy=HEALTHY,
        check_propagation=lambda _: None,
        has_seals=lambda _: True,
    )
