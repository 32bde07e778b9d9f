"""`crust doctor`: each check, against a root directory that a test fills."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import crust
from crust.cli import install
from crust.cli.doctor import csi_driver_objects, examine
from crust.cli.doctor.checks import CHECKS
from crust.cli.doctor.finding import Finding, Level
from crust.cli.doctor.node import Node
from crust.core import errors
from crust.inspection import views
from crust.inspection.views import ProxyAnswer
from tests.support.drivers import fake_driver
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.unit.cli.conftest import invoked

DEPLOY = Path(__file__).parents[3] / "deploy"
RELEASE = "6.1.0-18-amd64"
DRIVER = views.DriverRow("block.csi.crust.dev", "/s", "/b", "ready", crust.__version__, "", 0, "")
HANDLER_ANSWER = (views.HandlerRow("kata", "1", "/h", (), (), 0, None),)  # type: ignore[arg-type]
HEALTHY = ProxyAnswer(crust.__version__, (DRIVER,), HANDLER_ANSWER, ())


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
    )


def write(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def found(node: Node, name: str) -> tuple[Finding, ...]:
    return examine.findings(node, (name,))


def bad(node: Node, name: str, level: Level) -> str:
    """The text of the first finding that is not ok; it says what, why and what to do."""
    first = next(finding for finding in found(node, name) if finding.level is not Level.OK)
    assert first.level is level
    assert first.todo
    return f"{first.what}: {first.why}; {first.todo}"


@pytest.mark.parametrize(
    "name", [check for check in CHECKS if check not in ("sockets", "csidriver")]
)
def test_good_node_passes(good: Node, name: str) -> None:
    assert {finding.level for finding in found(good, name)} == {Level.OK}


@pytest.mark.parametrize("where", ["settings", "proxy"])
def test_forced_detach_is_a_warning_for_drivers_that_are_attached(good: Node, where: str) -> None:
    """Our own is not: its CSIDriver has attachRequired: false."""
    ebs = 'name = "ebs.csi.aws.com"\nsocket = "/s"\nbackend = "/b"\n'
    if where == "settings":
        with (good.root / "etc/crust/node.toml").open("a") as toml:
            toml.write(f"[[proxy.drivers]]\n{ebs}")
    else:
        other = replace(DRIVER, name="ebs.csi.aws.com")
        good = replace(good, proxy=replace(HEALTHY, drivers=(DRIVER, other)))
    text = bad(good, "forced-detach", Level.WARNING)
    assert "it concerns ebs.csi.aws.com" in text
    assert "grep force-detach" in text


def test_forced_detach_of_unknown_drivers_is_a_warning(root: Path) -> None:
    bad(Node(root=root, release=RELEASE), "forced-detach", Level.WARNING)


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
    overlay = DEPLOY / "kubernetes/overlays/wrapped-driver/node.toml"
    write(good.root, "etc/crust/node.toml", overlay.read_text())
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


def test_doctor_settings_of_proxy_count_where_its_unit_is_enabled(good: Node) -> None:
    text = (good.root / "etc/crust/proxy.toml").read_text()
    write(good.root, "etc/crust/proxy.toml", text.replace("/plugins_registry", "/other"))
    assert {finding.level for finding in found(good, "kubelet-registry")} == {Level.OK}
    write(good.root, "etc/systemd/system/multi-user.target.wants/crust-proxy.service")
    assert "/other does not exist" in bad(good, "kubelet-registry", Level.ERROR)


def test_doctor_sockets_are_those_of_drivers_that_proxy_has(good: Node) -> None:
    other = replace(DRIVER, name="other.csi", socket="/run/other.sock")
    (finding,) = found(replace(good, proxy=replace(HEALTHY, drivers=(other,))), "sockets")
    assert "/run/other.sock" in finding.what
    assert "block.csi.crust.dev" not in finding.what


def test_unknown_setting_is_an_error_with_its_name(good: Node) -> None:
    write(good.root, "etc/crust/shim.toml", 'socket = "/a"\ndriver_socket = "/b"\nfoo = 1\n')
    text = bad(good, "settings", Level.ERROR)
    assert "/etc/crust/shim.toml is refused" in text
    assert "foo" in text


def test_settings_that_others_can_write_are_an_error(good: Node) -> None:
    (good.root / "etc/crust/proxy.toml").chmod(0o666)
    assert "chmod go-w /etc/crust/proxy.toml" in bad(good, "settings", Level.ERROR)


def test_node_without_settings_is_a_warning(root: Path) -> None:
    bad(Node(root=root), "settings", Level.WARNING)


@pytest.mark.parametrize(
    ("program", "old", "new", "words"),
    [
        ("shim", 'socket = "/run/crust/shim', 'socket = "/run/x', "no proxy calls the shim at /run/x"),
        ("driver", 'socket = "/run/crust/driver', 'socket = "/run/x', "no shim calls the driver"),
        ("driver", "/run/crust/runtime.sock", "/run/x.sock", "the driver asks the proxy at /run/x"),
    ],
)  # fmt: skip
def test_sockets_that_do_not_match_are_an_error(
    good: Node, program: str, old: str, new: str, words: str
) -> None:
    file = good.root / f"etc/crust/{program}.toml"
    text = file.read_text()
    file.write_text(text.replace(old, new, 1))
    assert words in bad(good, "sockets-match", Level.ERROR)


def test_sockets_are_served_or_stale_or_missing(good: Node) -> None:
    run = good.root / "run/crust"
    run.mkdir(parents=True)
    run.chmod(0o777)
    assert "chmod 0700 /run/crust" in bad(good, "sockets", Level.ERROR), "and not: remove it"
    run.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as served, socket.socket(socket.AF_UNIX) as left:
        served.bind(str(good.root / "run/crust/runtime.sock"))
        served.listen()
        left.bind(str(good.root / "run/crust/handlers.sock"))
        levels = [finding.level for finding in found(good, "sockets")]
        text = " ".join(f"{finding.what} {finding.why}" for finding in found(good, "sockets"))
    assert levels == [Level.OK, Level.ERROR, Level.ERROR]
    assert "the socket is stale" in text
    assert "inspect.sock" in text


def test_proxy_that_is_away_is_one_error(good: Node) -> None:
    node = replace(good, proxy=errors.PeerUnavailable("no proxy", why="down", hint="start it"))
    assert "no proxy" in bad(node, "proxy", Level.ERROR)
    assert [found(node, name) for name in ("drivers", "versions", "handlers")] == [(), (), ()]


@pytest.mark.parametrize(
    ("name", "answered", "level"),
    [
        ("proxy", replace(HEALTHY, problems=(views.Problem("threads", "X", "hangs"),)), Level.ERROR),
        ("proxy", replace(HEALTHY, exceptions=(views.Problem("groups", "X", "/agent"),)), Level.WARNING),
        ("drivers", replace(HEALTHY, drivers=(replace(DRIVER, state="not-ready"),)), Level.ERROR),
        ("versions", replace(HEALTHY, version="0.0.1"), Level.WARNING),
        ("versions", replace(HEALTHY, drivers=(replace(DRIVER, version="9"),)), Level.WARNING),
        ("versions", replace(HEALTHY, drivers=(replace(DRIVER, shim_version="0.0.1"),)), Level.WARNING),
        ("handlers", replace(HEALTHY, handlers=()), Level.ERROR),
    ],
)  # fmt: skip
def test_condition_that_the_proxy_reports_is_a_finding(
    good: Node, name: str, answered: ProxyAnswer, level: Level
) -> None:
    bad(replace(good, proxy=answered), name, level)


def test_mounts_that_do_not_propagate_are_an_error(good: Node) -> None:
    def refuse(path: str) -> None:
        raise errors.NotReady.named("MountsNotPropagated", path, why="a slave", hint="share")

    node = replace(good, check_propagation=refuse)
    assert "[MountsNotPropagated]" in bad(node, "mount-propagation", Level.ERROR)


def test_check_that_fails_itself_is_an_error(good: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Node) -> Iterator[Finding]:
        raise PermissionError("not allowed")

    monkeypatch.setitem(CHECKS, "kernel", fail)
    assert "not allowed" in bad(good, "kernel", Level.ERROR)


async def test_command_prints_json_and_exits_1_for_an_error(root: Path) -> None:
    result = await invoked("doctor", "--check", "proxy", "--run-dir", str(root), "-o", "json")
    document = json.loads(result.output)
    assert (result.exit_code, document["healthy"]) == (1, False)
    assert [finding["check"] for finding in document["findings"]] == ["proxy"]


async def test_unknown_check_is_wrong_usage() -> None:
    result = await invoked("doctor", "--check", "x")
    assert result.exit_code == 2
    assert "there are" in result.output


NAME = "csi.example.com"


@contextmanager
def of_cluster(root: Path, api: FakeKubernetes, defer: str = "") -> Iterator[Node]:
    """A node whose settings name a driver, at csi.sock, and the API."""
    with fake_kubernetes.serving(api, root) as kubeconfig:
        driver = f'name = "{NAME}"\nsocket = "{root}/csi.sock"\nbackend = "/b.sock"\n{defer}\n'
        table = f'[kubernetes]\nkubeconfig = "{kubeconfig}"\nruntime_handlers = ["kata"]\n'
        write(root, "etc/crust/proxy.toml", f"[[drivers]]\n{driver}{table}")
        yield Node(root=root, csi_driver_mismatches=csi_driver_objects.mismatches)


@pytest.mark.parametrize(
    ("pod_info", "defer", "level"),
    [
        (True, "", Level.OK),
        (False, "", Level.WARNING),
        (False, 'defer = "runtime-class"', Level.ERROR),
    ],
)
async def test_csi_driver_object_is_compared_with_the_settings(
    root: Path, *, pod_info: bool, defer: str, level: Level
) -> None:
    """The real API over HTTP, and a driver at the socket that the kubelet calls."""
    api = FakeKubernetes()
    api.add_object("csidrivers", NAME, spec={"attachRequired": False, "podInfoOnMount": pod_info})
    driver = fake_driver.FakeDriver()
    with of_cluster(root, api, defer) as node:
        async with fake_driver.serving(driver, str(root / "csi.sock")):
            (result,) = await asyncio.to_thread(found, node, "csidriver")
    assert (result.level, NAME in result.what) == (level, True)


def test_cluster_is_not_asked_without_access_to_it(good: Node) -> None:
    assert (
        found(replace(good, csi_driver_mismatches=csi_driver_objects.mismatches), "csidriver") == ()
    )


def test_kubernetes_api_that_is_away_is_a_finding_of_doctor(root: Path) -> None:
    api = FakeKubernetes()
    api.faults.status = 500
    with of_cluster(root, api) as node:
        assert "Kubernetes API" in bad(node, "csidriver", Level.ERROR)
