"""A node on which crust is installed by the commands of docs/install.md, under a real systemd."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio
import pytest

from crust.rpc import channel
from crust.runtime_handler.registration import Feature
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import ENVIRONMENT, Machine
from tests.support.co import MIB, NAMED, Co, capability
from tests.support.faults.refusals import refused, repeated
from tests.support.runtimes import fake_handler

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]  # the first one waits for the boot

DOCS = booted_systemd.CHECKOUT / "docs"
PAGE = "".join(
    (DOCS / page).read_text(encoding="utf-8")
    for page in ("install.md", "operations.md", "kubernetes.md", "wrapping.md")
)
KUBELET = "/var/lib/kubelet"
SOCKET = f"{KUBELET}/plugins/block.csi.crust.dev/csi.sock"
STAGING, TARGET = f"{KUBELET}/plugins/kubernetes.io/csi/v/globalmount", f"{KUBELET}/pods/p/mount"
THREE = ("crust-driver", "crust-shim", "crust-proxy")
KILLED = """
mount {device} /mnt; echo written >/mnt/file; sync
python3 -c 'import fcntl, os; fcntl.ioctl(os.open("/mnt", os.O_RDONLY), 0x8004587D, b"\\2\\0\\0\\0")'
umount /mnt; dumpe2fs -h {device}
"""
"""A guest that writes and is killed: EXT4_IOC_SHUTDOWN (fs/ext4/ext4.h) drops all that is not on the disk by then."""


def documented(heading: str) -> list[str]:
    """The commands of the first block below a heading of the page. The environment is there: it needs no network."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.search(r"\n((?:    .+\n)+)", section)
    assert block is not None, f"no block of commands below {heading!r}"
    lines = [line.strip() for line in block[1].splitlines()]
    return [line for line in lines if "pip install" not in line and "-m venv" not in line]


def follow(machine: Machine, heading: str) -> None:
    for line in documented(heading):
        machine.output("sh", "-c", line)


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


def mounted(machine: Machine) -> bool:
    """Whether the machine, in process 1's mount namespace, sees the volume."""
    return machine.run("mountpoint", "--quiet", TARGET).returncode == 0


def main_pid(machine: Machine, unit: str) -> str:
    return machine.output("systemctl", "show", "--property=MainPID", "--value", unit).strip()


async def test_mount_of_the_unit_outlives_a_kill(machine: Machine) -> None:
    async with volume(machine) as node:
        assert mounted(machine)
        killed = main_pid(machine, "crust-node")
        machine.output("kill", "-KILL", killed)
        # it starts again; the connection to the killed one may end in the call
        info = csi_pb2.NodeGetInfoRequest()
        await repeated(
            lambda: node.NodeGetInfo(info, timeout=40, wait_for_ready=True), *grpc.StatusCode
        )
        assert main_pid(machine, "crust-node") not in (killed, "0")
        assert mounted(machine)
    assert not mounted(machine)


async def test_upgrade_keeps_settings_and_mounts(machine: Machine) -> None:
    settings = machine.root / "etc/crust/node.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    async with volume(machine):
        follow(machine, "Upgrade")
        assert mounted(machine)
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


def test_backup_has_the_pools_id_and_start_waits_for_sockets(machine: Machine) -> None:
    follow(machine, "Backup")
    assert (
        "./block/pool.json"
        in machine.output("tar", "--list", "--file", "/root/crust-pool.tar").split()
    )
    assert Path(f"{machine.root}{SOCKET}").is_socket()


def test_restore_brings_the_pool_back_as_it_was(machine: Machine) -> None:
    pool_id = machine.output("cat", "/var/lib/crust/block/pool.json")
    machine.output("touch", "/var/lib/crust/block/made-since")
    follow(machine, "Restore")
    assert machine.output("cat", "/var/lib/crust/block/pool.json") == pool_id
    assert machine.run("ls", "/var/lib/crust/block/made-since").returncode != 0


def serve(machine: Machine, *units: str) -> None:
    """Start these units: they alone serve then."""
    machine.output("systemctl", "start", *units)
    for unit in ("crust-node", *THREE):
        active = machine.run("systemctl", "is-active", unit).stdout.strip()
        assert active == ("active" if unit in units else "inactive"), unit


@pytest.fixture(params=[("crust-node",), THREE], ids=["one", "three"])
def units(request: pytest.FixtureRequest, machine: Machine) -> Iterator[None]:
    """The one unit serves, or three in its place."""
    serve(machine, *request.param)
    yield
    serve(machine, "crust-node")


HANDLER = """
import asyncio
from crust.core.volumes import HandlerName
from crust.runtime_handler import registration, service

async def main():
    features = frozenset(map(registration.Feature, {features}))
    filesystems = frozenset({{"ext4", "xfs", "btrfs"}})
    request = registration.RegisterRequest(
        HandlerName("kata"), "1.0", "/run/kata.sock", filesystems, features
    )
    served = service.serving("/run/kata.sock", service.Handler())
    async with served, registration.registered("/run/crust/handlers.sock", request) as session:
        await session.registered.wait()
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def handler(
    machine: Machine, features: frozenset[Feature] = fake_handler.ALL_FEATURES
) -> AsyncIterator[None]:
    """The runtime handler kata, a process of the machine, registered with its proxy while the block runs."""
    program = HANDLER.format(features=sorted(feature.value for feature in features))
    with machine.running(f"{ENVIRONMENT}/bin/python", "-c", program) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "registered\n"
        yield


@asynccontextmanager
async def staged(machine: Machine) -> AsyncIterator[tuple[Co, str]]:
    """A volume that is staged beside a runtime handler; the block unpublishes it."""
    for path in (STAGING, str(Path(TARGET).parent)):
        machine.output("mkdir", "-p", path)
    async with channel.connect(f"{machine.root}{SOCKET}") as connected, handler(machine):
        co = Co(connected, waits=True)
        volume_id = (await co.create("v")).volume_id
        await co.stage(volume_id, STAGING)
        yield co, volume_id
        await co.unstage(volume_id, STAGING)
        await co.delete(volume_id)


CLAIM = """
import signal, sys
from crust.core import volumes
from crust.runtime_handler import claim_volume
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
names = volumes.TargetPath(sys.argv[1]), volumes.SandboxId("s"), volumes.HandlerName("kata")
with claim_volume("/run/crust/volumes", *names, features=[*volumes.HandlerFeature]) as claim:
    print(claim.record.device, flush=True)
    signal.sigwait({signal.SIGTERM})
"""


@contextmanager
def sandbox(machine: Machine) -> Iterator[str]:
    """A sandbox that has the volume of the target, by a process among the node's own; its device."""
    with machine.running(f"{ENVIRONMENT}/bin/python", "-c", CLAIM, TARGET) as process:
        assert process.stdout is not None
        device = process.stdout.readline().strip()
        assert device.startswith("/dev/"), device + process.stdout.read()
        yield device
        (claimant,) = booted_systemd.children(process.pid)
        os.kill(claimant, signal.SIGTERM)
        assert process.wait(60) == 0


async def crash(machine: Machine, co: Co, volume_id: str) -> None:
    """A guest has the volume and is killed; then the CO takes the volume back and stages it again."""
    await co.publish(volume_id, TARGET, staging=STAGING, volume_context=NAMED)
    with sandbox(machine) as device:
        pass  # its hold would refuse the mount that stands for the guest's
    killed = machine.output("unshare", "--mount", "sh", "-ec", KILLED.format(device=device))
    assert "needs_recovery" in killed
    await co.unpublish(volume_id, TARGET)
    await co.unstage(volume_id, STAGING)
    await co.stage(volume_id, STAGING)


@pytest.mark.usefixtures("units")
async def test_units_defer_a_publish_and_its_unpublish(machine: Machine) -> None:
    async with staged(machine) as (co, volume_id):
        await co.publish(volume_id, TARGET, staging=STAGING, volume_context=NAMED)
        with sandbox(machine) as device:
            assert device.startswith("/dev/loop")
            assert machine.run("findmnt", "--source", device).returncode == 1  # not on the host
        await co.unpublish(volume_id, TARGET)
        assert not mounted(machine)


@pytest.mark.usefixtures("units")
async def test_units_stage_again_what_a_killed_guest_left(machine: Machine) -> None:
    """e2fsck replays the journal, confined, before another guest or the host has the volume."""
    async with staged(machine) as (co, volume_id):
        await crash(machine, co, volume_id)
        await co.publish(volume_id, TARGET, staging=STAGING, volume_context=NAMED)
        with sandbox(machine) as device:
            assert "needs_recovery" not in machine.output("dumpe2fs", "-h", device)
        await co.unpublish(volume_id, TARGET)
        await crash(machine, co, volume_id)
        await co.publish(volume_id, TARGET, defer=False, staging=STAGING)
        assert machine.output("cat", f"{TARGET}/file") == "written\n"
        await co.unpublish(volume_id, TARGET)


GROUP = 3000
OF_ANOTHER_USER = f"""
mkdir {TARGET}/d; echo written >{TARGET}/d/f; chmod 0600 {TARGET}/d/f; chown --recursive 1000:1000 {TARGET}/d
"""


async def live(co: Co, machine: Machine, fs_type: str) -> None:
    """A volume with a filesystem, from create to delete, that a pod with fsGroup gets from a pod without."""
    plain = capability(fs_type)
    grouped = capability(fs_type, volume_mount_group=str(GROUP))
    volume_id = (await co.create(fs_type, plain, size=320 * MIB)).volume_id
    await co.stage(volume_id, STAGING, plain)
    await co.publish(volume_id, TARGET, plain, defer=False, staging=STAGING)
    machine.output("sh", "-ec", OF_ANOTHER_USER)
    await co.unpublish(volume_id, TARGET)
    await co.publish(volume_id, TARGET, grouped, defer=False, staging=STAGING)
    seen = machine.output("stat", "--format=%u:%g %a", f"{TARGET}/d", f"{TARGET}/d/f")
    assert seen.splitlines() == [f"1000:{GROUP} 2775", f"1000:{GROUP} 660"]
    snapshot = await co.snapshot(volume_id)
    await co.grow(volume_id, 400 * MIB)
    if fs_type == "ext4":  # the machine itself lacks the capability
        growth = co.expand(volume_id, TARGET, 400 * MIB)
        await refused(growth, grpc.StatusCode.FAILED_PRECONDITION, "CAP_SYS_RESOURCE")
    else:
        assert (await co.expand(volume_id, TARGET, 400 * MIB)).capacity_bytes >= 400 * MIB
    assert (await co.stats(volume_id, TARGET)).usage
    await co.unpublish(volume_id, TARGET)
    await co.unstage(volume_id, STAGING)
    await co.delete_snapshot(snapshot.snapshot_id)
    await co.delete(volume_id)


@pytest.mark.usefixtures("units")
async def test_volumes_live_under_the_capabilities_of_units(machine: Machine) -> None:
    for path in (STAGING, str(Path(TARGET).parent)):
        machine.output("mkdir", "-p", path)
    async with channel.connect(f"{machine.root}{SOCKET}") as connected:
        co = Co(connected, waits=True)
        for fs_type in ("ext4", "xfs", "btrfs"):
            await live(co, machine, fs_type)
        raw = capability(block=True)
        volume_id = (await co.create("raw", raw)).volume_id
        await co.stage(volume_id, STAGING, raw)
        await co.publish(volume_id, TARGET, raw, defer=False, staging=STAGING)
        machine.output("dd", "if=/dev/zero", f"of={TARGET}", "bs=4k", "count=1", "oflag=direct")
        await co.unpublish(volume_id, TARGET)
        await co.unstage(volume_id, STAGING)
        await co.delete(volume_id)


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


def test_keepers_outlive_the_stop_of_the_unit_that_started_them(machine: Machine) -> None:
    """A keeper lies in the unit's control group, and has the claim of a virtual machine that goes on."""
    fit = machine.root / "opt/kata/share/defaults/kata-containers/configuration-clh.toml"
    fit.parent.mkdir(parents=True)
    fit.write_text("[hypervisor.clh]\ndisable_block_device_use = false\n[runtime]\n")
    machine.output("systemd-run", "--unit=hypervisor", "sleep", "infinity")
    machine.output("systemctl", "start", "crust-kata")
    ordered = machine.output("systemctl", "show", "--property=After,Before", "crust-kata")
    after, before = sorted(ordered.splitlines())
    assert "containerd.service" in after
    assert "kubelet.service" in before
    join = "for g in $(find /sys/fs/cgroup -name crust-kata.service); do echo $$ >$g/cgroup.procs; done"
    keep = f"crust keeper --socket /run/crust/k.sock --pid {main_pid(machine, 'hypervisor')}"
    keepers = json.loads(machine.output("sh", "-c", f"{join}; exec {keep}"))["pids"]
    group = machine.output("cat", f"/proc/{keepers[0]}/cgroup")
    assert "crust-kata.service" in group
    try:
        for verb in ("restart", "stop"):
            machine.output("systemctl", verb, "crust-kata")
            machine.output("kill", "-0", *map(str, keepers))
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
        "journalctl", "-u", "crust-shim@vendor", "-o", "cat"
    )
    settings.unlink()


def test_uninstall_is_refused_while_unit_runs_and_leaves_no_file(machine: Machine) -> None:
    share = "/usr/local/share"
    assert machine.output("sh", "-c", f"ls {share}/man/man1/crust-gc.1 {share}/zsh/site-functions")
    completed = f". {share}/bash-completion/completions/crust && complete -p crust"
    assert "_crust_completion crust" in machine.output("bash", "-c", completed)
    refused = machine.run("crust", "uninstall")
    assert (refused.returncode, "crust-node.service still runs" in refused.stderr) == (1, True)
    follow(machine, "Uninstall")
    left = machine.output("find", "/usr/local", "/etc", "-name", "*crust*").split()
    assert left == ["/etc/crust"]
    assert not machine.run("systemctl", "cat", "crust-node").stdout
