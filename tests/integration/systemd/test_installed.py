"""A node on which crust is installed by the commands of docs/install.md, under a real systemd."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from crust.rpc import channel
from crust.runtime_handler import keeper
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import Machine
from tests.support.co import Co
from tests.support.faults.refusals import repeated
from tests.support.forms.form import KUBELET, STAGING, TARGET, staged
from tests.support.forms.units import Units

pytestmark = pytest.mark.root

DOCS = booted_systemd.CHECKOUT / "docs"
PAGE = "".join(
    (DOCS / page).read_text(encoding="utf-8")
    for page in ("install.md", "operations.md", "kubernetes.md", "wrapping.md")
)
SOCKET = f"{KUBELET}/plugins/block.csi.crust.dev/csi.sock"


def documented(heading: str) -> list[str]:
    """The commands of the first block below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.search(r"\n((?:    .+\n)+)", section)
    assert block is not None, f"no block of commands below {heading!r}"
    return [line.strip() for line in block[1].splitlines()]


def follow(machine: Machine, heading: str) -> None:
    for line in documented(heading):
        run(machine, line)


def run(machine: Machine, line: str, directory: str = "/opt") -> None:
    """In the directory of the wheel. The environment is there, and has what the wheel needs: it needs no network."""
    if "--require-hashes" not in line and "-m venv" not in line:
        machine.output("sh", "-c", f"cd {directory} && {line}")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One for this file, with crust installed and serving."""
    capabilities.need("mount", "loop", "systemd")
    with booted_systemd.machine() as booted:
        follow(booted, "As units of systemd")
        yield booted


@asynccontextmanager
async def volume(machine: Machine) -> AsyncIterator["csi_pb2_grpc.NodeAsyncStub"]:
    """A volume that is staged while the block runs, through the socket that a kubelet calls."""
    for path in (STAGING, str(Path(TARGET).parent)):
        machine.output("mkdir", "-p", path)
    async with channel.connect(f"{machine.root}{SOCKET}") as connected:
        co = Co(connected, waits=True)
        volume_id = (await co.create("v")).volume_id
        await co.stage(volume_id, STAGING)
        await co.publish(volume_id, TARGET, defer=False, staging=STAGING)
        yield co.node
        await co.unpublish(volume_id, TARGET)
        await co.unstage(volume_id, STAGING)
        await co.delete(volume_id)


async def test_mount_of_the_unit_outlives_a_kill(machine: Machine) -> None:
    async with volume(machine) as node:
        assert Units(machine).is_mounted()
        killed = Units(machine).main_pid("crust-node")
        machine.output("kill", "-KILL", killed)
        # it starts again; the connection to the killed one may end in the call
        info = csi_pb2.NodeGetInfoRequest()
        await repeated(
            lambda: node.NodeGetInfo(info, timeout=40, wait_for_ready=True), *grpc.StatusCode
        )
        assert Units(machine).main_pid("crust-node") not in (killed, "0")
        assert Units(machine).is_mounted()
    assert not Units(machine).is_mounted()


async def test_upgrade_keeps_settings_and_mounts(machine: Machine) -> None:
    settings = machine.root / "etc/crust/node.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    async with volume(machine):
        follow(machine, "Upgrade")
        assert Units(machine).is_mounted()
    assert settings.read_text().endswith("# mine\n")


def test_driver_is_ready_without_kubelet_and_not_registered_with_one(machine: Machine) -> None:
    assert machine.run("crust", "drivers").returncode == 0
    sign = f"{KUBELET}/device-plugins/kubelet.sock"  # a kubelet that runs has it
    machine.output("mkdir", "-p", str(Path(sign).parent))
    machine.output("touch", sign)
    shown = machine.run("crust", "drivers")
    assert (shown.returncode, "[NotRegisteredYet]" in shown.stdout) == (1, True), shown
    machine.output("rm", sign)


def test_commands_that_look_leave_no_line_in_the_journal(machine: Machine) -> None:
    for words in (["status"], ["drivers"], ["doctor"], ["pool"]):
        machine.run("crust", *words)
    with machine.running("crust", "volumes", "--watch") as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline()
        watch.terminate()
    journal = machine.output("journalctl", "--unit=crust-node", "--output=cat")
    assert "driver serves" in journal
    for rpc in ("GetHealth", "ListDrivers", "Watch", "GetPool", "Probe"):
        assert f'"rpc": "{rpc}"' not in journal


def test_installed_units_have_neither_swap_nor_core_files(machine: Machine) -> None:
    """As systemd has read the installed files; of the daemon that runs the kernel says it for core files too."""
    files = machine.output(
        "sh", "-c", "cd /usr/local/lib/systemd/system; echo crust-*.service"
    ).split()
    units = [unit.replace("@.", "@vendor.") for unit in files]
    assert len(units) == 6
    for unit in units:
        shown = machine.output("systemctl", "show", "--property=MemorySwapMax,LimitCORE", unit)
        assert sorted(shown.split()) == ["LimitCORE=0", "MemorySwapMax=0"], unit
    (pid,) = {Units(machine).main_pid("crust-node")} - {"0"}
    limit = machine.output("grep", "core file size", f"/proc/{pid}/limits")
    assert limit.split()[4:6] == ["0", "0"]


def test_unit_whose_filter_refuses_a_question_says_so(machine: Machine) -> None:
    """Only the daemon itself meets its filter: the shell in which an operator looks has none."""
    drop_in = "/run/systemd/system/crust-node.service.d/filter.conf"
    machine.output("mkdir", "-p", str(Path(drop_in).parent))
    line = f"printf '[Service]\\nRestrictSUIDSGID=yes\\n' > {drop_in}"
    machine.output("sh", "-ec", f"{line}; systemctl daemon-reload; systemctl restart crust-node")
    follow_log = ("journalctl", "--follow", "--lines=20", "--unit=crust-node", "--output=cat")
    with machine.running(*follow_log) as journal:
        assert journal.stdout is not None
        assert any("way to a target (openat2)" in line for line in journal.stdout)
    for words in (("status",), ("doctor", "--check", "proxy")):
        shown = machine.run("crust", *words).stdout
        assert "way to a target (openat2)" in shown, shown
        assert "ENOSYS" in shown
    machine.output("rm", drop_in)
    machine.output("sh", "-ec", "systemctl daemon-reload; systemctl restart crust-node")
    assert "openat2" not in machine.run("crust", "status").stdout


def test_keepers_outlive_stop_and_kill_of_the_whole_unit(machine: Machine) -> None:
    """A keeper is started in the unit's control group, and has the claim of a virtual machine that goes on."""
    fit = machine.root / "opt/kata/share/defaults/kata-containers/configuration-clh.toml"
    fit.parent.mkdir(parents=True)
    fit.write_text("[hypervisor.qemu]\ndisable_block_device_use = false\n[runtime]\n")
    machine.output("systemd-run", "--unit=hypervisor", "sleep", "infinity")
    machine.output("systemctl", "start", "crust-kata")
    ordered = machine.output("systemctl", "show", "--property=After,Before", "crust-kata")
    after, before = sorted(ordered.splitlines())
    assert "containerd.service" in after
    assert "kubelet.service" in before
    join = "for g in $(find /sys/fs/cgroup -name crust-kata.service); do echo $$ >$g/cgroup.procs; done"
    keep = f"crust keeper --socket /run/crust/k.sock --pid {Units(machine).main_pid('hypervisor')}"
    keepers = json.loads(machine.output("sh", "-c", f"{join}; exec {keep}"))["pids"]
    killed = Units(machine).main_pid("crust-kata")
    try:
        machine.output("systemctl", "kill", "--kill-who=all", "--signal=KILL", "crust-kata")
        for verb in ("restart", "stop"):
            machine.output("systemctl", verb, "crust-kata")
            machine.output("kill", "-0", *map(str, keepers))
        assert machine.run("kill", "-0", killed).returncode == 1
    finally:
        machine.output("systemctl", "stop", "hypervisor", "crust-kata")


def test_wrong_settings_are_not_tried_again(machine: Machine) -> None:
    settings = machine.root / "etc/crust/shim-vendor.toml"
    settings.write_text("colour = 'red'\n")
    assert machine.run("systemctl", "start", "crust-shim@vendor").returncode != 0
    shown = machine.output(
        "systemctl", "show", "--property=ActiveState,ExecMainStatus,NRestarts", "crust-shim@vendor"
    )
    assert set(shown.split()) == {"ActiveState=failed", "ExecMainStatus=2", "NRestarts=0"}
    assert "colour is no setting" in machine.output(
        "journalctl", "-u", "crust-shim@vendor", "-o", "cat", "-p", "err"
    )
    settings.unlink()


async def test_uninstall_is_refused_while_a_volume_is_deferred(machine: Machine) -> None:
    """The units are stopped, and a guest may have it: it is named, and its target stays sealed."""
    below = f"umount {TARGET}; lsattr -d {TARGET} | cut -d' ' -f1"
    async with staged(Units(machine)) as volume:
        await volume.publish()
        machine.output("systemctl", "disable", "--now", "crust-node")
        refused = machine.run("crust", "uninstall")
        assert refused.returncode == 1
        for name in (f"the mount on {TARGET}", "the entry ", f"the staged volume {volume.id}"):
            assert name in refused.stderr
        assert re.search(f"/dev/loop[0-9]+ with [^ ]*/{volume.id}", refused.stderr)
        assert "i" in machine.output("unshare", "--mount", "sh", "-ec", below)
        machine.output("systemctl", "enable", "--now", "crust-node")
        await volume.unpublish()


def test_uninstall_is_refused_while_unit_runs_and_leaves_no_file(machine: Machine) -> None:
    share = "/usr/local/share"
    assert machine.output("sh", "-c", f"ls {share}/man/man1/crust-gc.1 {share}/zsh/site-functions")
    completed = f". {share}/bash-completion/completions/crust && complete -p crust"
    assert "_crust_completion crust" in machine.output("bash", "-c", completed)
    refused = machine.run("crust", "uninstall")
    assert (refused.returncode, "crust-node.service still runs" in refused.stderr) == (1, True)
    target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount"
    machine.output("sh", "-c", f"mkdir -p {target}; chattr +i {target}")  # as a reboot leaves it
    follow(machine, "Uninstall")
    machine.output("rmdir", target)
    left = machine.output("find", "/usr/local", "/etc", "-name", "*crust*").split()
    assert left == ["/etc/crust"]
    assert not machine.output("find", "/sys/fs/cgroup", "-name", keeper.GROUP)
    assert not machine.run("systemctl", "cat", "crust-node").stdout
