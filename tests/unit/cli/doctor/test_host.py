"""`crust doctor`: the kernel, the programs and the settings of the host."""

from dataclasses import replace

import pytest

from crust.cli import install
from crust.cli.doctor.node import Level, Node
from tests.support import chart
from tests.support.nodes.examined_node import DEPLOY, RELEASE, bad, found, write


@pytest.mark.parametrize("has", ["module", "loaded", ""])
def test_kernel_without_rbd_is_warning_for_the_rbd_engine(good: Node, has: str) -> None:
    write(good.root, "etc/systemd/system/multi-user.target.wants/crust-proxy.service")
    words = ('engine = "rbd"', 'mode = "node"', 'node_id = "a"', 'socket = "/d.sock"', "[rbd]")
    settings = "\n".join((*words, 'monitors = "v2:192.0.2.1:3300"', 'pool = "rbd"'))
    write(good.root, "etc/crust/driver.toml", settings)
    if has == "module":
        write(good.root, f"lib/modules/{RELEASE}/modules.dep", "kernel/drivers/block/rbd.ko: \n")
    if has == "loaded":
        (good.root / "sys/bus/rbd").mkdir(parents=True)
    if has:
        assert "the kernel has rbd" in found(good, "rbd")[0].what
    else:
        assert "NoHostDevice" in bad(good, "rbd", Level.WARNING)


def test_each_of_two_drivers_of_a_node_is_looked_at(good: Node) -> None:
    local = "node_deployment = true\n"
    shared = """
mode = "node"
engine = "rbd"
driver_name = "rbd.csi.crust.dev"
run_dir = "/run/crust/driver-rbd"
[driver.rbd]
monitors = "v2:192.0.2.1:3300"
pool = "rbd"
"""
    for first, second in ((local, shared), (shared, local)):
        tables = f"[[driver]]\n{first}[[driver]]\n{second}"
        write(good.root, "etc/crust/node.toml", tables)
        assert "NoHostDevice" in bad(good, "rbd", Level.WARNING)


@pytest.mark.parametrize("release", ["5.14.21-default", "4.18.0", "?"])
def test_old_kernel_is_an_error(good: Node, release: str) -> None:
    assert "diskseq" in bad(replace(good, release=release), "kernel", Level.ERROR)


@pytest.mark.parametrize(
    ("removed", "name", "level", "words"),
    [
        ("dev/loop-control", "loop", Level.ERROR, "modprobe loop"),
        ("proc/filesystems", "filesystems", Level.WARNING, "install the module ext4"),
        ("sys/fs/cgroup/cgroup.controllers", "cgroups", Level.WARNING, "not mounted"),
        ("sys/fs/cgroup/cgroup.subtree_control", "cgroups", Level.WARNING, "echo +io"),
        ("sys/fs/cgroup/kubepods.slice", "cgroups", Level.WARNING, "io_cgroup"),
        ("usr/sbin/bwrap", "programs", Level.ERROR, "install bubblewrap"),
        ("usr/lib/x86_64-linux-gnu/libseccomp.so.2", "programs", Level.ERROR, "libseccomp2"),
        ("var/lib/kubelet/pods", "kubelet-root", Level.WARNING, "start the kubelet"),
        ("var/lib/kubelet/plugins_registry", "kubelet-registry", Level.ERROR, "plugins_registry"),
    ],
)
def test_what_is_missing_is_found(
    good: Node, removed: str, name: str, level: Level, words: str
) -> None:
    path = good.root / removed
    path.rmdir() if path.is_dir() else path.unlink()
    assert words in bad(good, name, level)


def test_program_below_usr_local_is_none_that_crust_runs(good: Node) -> None:
    (good.root / "usr/local/sbin").mkdir(parents=True)
    (good.root / "usr/sbin/bwrap").rename(good.root / "usr/local/sbin/bwrap")
    assert "install bubblewrap" in bad(good, "programs", Level.ERROR)


def test_module_that_is_not_loaded_counts(good: Node) -> None:
    write(good.root, "proc/filesystems", "\text4\n\txfs\n")
    write(good.root, f"lib/modules/{RELEASE}/modules.dep", "kernel/fs/btrfs/btrfs.ko.xz: a.ko\n")
    assert {finding.level for finding in found(good, "filesystems")} == {Level.OK}


@pytest.mark.parametrize(
    ("present", "name", "cure"),
    [
        ("run/udev/control", "udev", "etc/udev/rules.d/59-crust.rules"),
        ("run/udev/control", "udev", str(install.RULES / "59-crust.rules")),
        ("usr/sbin/multipathd", "multipath", "etc/multipath/conf.d/crust.conf"),
    ],
)
def test_tool_without_filter_is_a_warning(good: Node, present: str, name: str, cure: str) -> None:
    write(good.root, present).chmod(0o755)
    bad(good, name, Level.WARNING)
    write(good.root, cure)
    assert {finding.level for finding in found(good, name)} == {Level.OK}


@pytest.mark.parametrize(
    ("text", "has_list", "level"),
    [
        ("\t# use_devicesfile = 1\n", True, Level.OK),  # RHEL 9
        ("\t# use_devicesfile = 0\n", True, Level.WARNING),  # Debian 12
        ("\t# use_devicesfile = 1\n\tuse_devicesfile = 0\n", True, Level.WARNING),
        ("\t# use_devicesfile = 0\n\tuse_devicesfile=1\n", True, Level.OK),
        ("", True, Level.WARNING),
        ("\t# use_devicesfile = 1\n", False, Level.WARNING),
        ((DEPLOY / "host" / "lvm.conf").read_text(), False, Level.WARNING),
        ((DEPLOY / "host" / "lvm.conf").read_text(), True, Level.OK),
        ('\tglobal_filter = [ "r|.*|" ]\n', False, Level.OK),
    ],
)
def test_lvm_needs_filter_or_list_that_exists_and_is_used(
    good: Node, text: str, level: Level, *, has_list: bool
) -> None:
    """The commented line of lvm.conf is the distribution's default."""
    write(good.root, "usr/sbin/lvm").chmod(0o755)
    if has_list:
        write(good.root, "etc/lvm/devices/system.devices")
    write(good.root, "etc/lvm/lvm.conf", f"devices {{\n{text}}}\n")
    assert {finding.level for finding in found(good, "lvm")} == {level}


def test_doctor_node_that_wraps_another_driver_needs_nothing_of_ours(good: Node) -> None:
    write(good.root, "etc/crust/node.toml", chart.settings(chart.objects(chart.choice("wrapped"))))
    (good.root / "usr/sbin/bwrap").unlink()
    (good.root / "dev/loop-control").unlink()
    for name in ("programs", "loop"):
        (only,) = found(good, name)
        assert (only.level, "does not run here" in only.what) == (Level.OK, True)
    write(good.root, "etc/crust/kata.toml", (DEPLOY / "crust/kata.toml").read_text())
    write(good.root, "etc/systemd/system/multi-user.target.wants/crust-kata.service")
    assert "bubblewrap" in bad(good, "programs", Level.ERROR)  # the proxy makes filesystems for it


@pytest.mark.parametrize(
    "version", ["mkfs.xfs version 99.1.0\n", "mkfs.btrfs, part of btrfs-progs v99.1\n"]
)
def test_doctor_mkfs_newer_than_the_kernel_is_a_warning(good: Node, version: str) -> None:
    assert "99.1" in bad(replace(good, version_of=lambda _: version), "mkfs", Level.WARNING)
    assert {finding.level for finding in found(replace(good, version_of=lambda _: ""), "mkfs")} == {
        Level.OK
    }
