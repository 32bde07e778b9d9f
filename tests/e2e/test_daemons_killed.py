"""The daemons of a whole node are killed with SIGKILL while a sandbox has a volume.

Each test has a node of its own, because it restarts processes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from click.testing import CliRunner

from crust.core import volumes
from crust.host.block import loop
from crust.host.mounts import mountinfo
from crust.runtime_handler.blocking import keepers
from crust.wire.csi.v1 import csi_pb2
from crust_conformance import catalogue
from crust_conformance.command import main
from examples.kata.demo.node import HANDLER
from tests.support import processes
from tests.support.faults.refusals import refused
from tests.support.nodes.whole_node import MIB, WholeNode, whole_node
from tests.support.runtimes import runtime_api
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.vm

LIMITS = volumes.IoLimits(500, 400, 30 * MIB, 20 * MIB)
BYTES = csi_pb2.VolumeUsage.BYTES


async def test_killed_runtime_adopts_its_sandboxes_after_restart(fresh_node: WholeNode) -> None:
    """Limits stay in force. The adopting daemon ends a freeze that began before, and the thaw reports it."""
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    boot = await fresh_node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; echo kept > /data/f"
    )
    async with runtime_api.connected(fresh_node) as api:
        assert await api.limit(target, LIMITS) is True
        assert await api.freeze(target, 60) is True
        await fresh_node.daemons.kill("runtime")
        await check_unavailable(api, target)
    # the VM still holds the claim
    ending = fresh_node.kubelet.unpublish(volume, target)
    await refused(ending, grpc.StatusCode.FAILED_PRECONDITION, "one")
    await refused(fresh_node.kubelet.stats(volume, target), grpc.StatusCode.UNAVAILABLE)
    await fresh_node.daemons.start("runtime")
    await fresh_node.kubelet.wait_ready(HANDLER)
    assert (await fresh_node.kubelet.stats(volume, target))[BYTES].used > 0
    again = await fresh_node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; cat /data/f"
    )
    assert again.splitlines() == [boot, "kept"]
    assert await runtime_api.limits_in_force(fresh_node) == {str(target): LIMITS}
    assert (
        await fresh_node.output("one", target, "echo goes on > /data/g; cat /data/g") == "goes on"
    )
    async with runtime_api.connected(fresh_node) as api:
        assert await api.thaw(target) is False


async def check_unavailable(api: runtime_api.RuntimeApi, target: Path) -> None:
    """A sandbox has the volume and its handler does not run: the answer is UNAVAILABLE, not "no sandbox"."""
    for asked in (api.freeze(target, 60), api.thaw(target), api.limit(target, volumes.IoLimits())):
        await refused(asked, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("victim", ["driver", "shim", "proxy"])
async def test_killed_daemon_leaves_the_volume_usable(fresh_node: WholeNode, victim: str) -> None:
    """A freeze also survives, because the guest holds it until the thaw."""
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    await fresh_node.output("one", target, "echo kept > /data/f")
    async with runtime_api.connected(fresh_node) as api:
        assert await api.freeze(target, 60) is True
        await fresh_node.daemons.kill(victim)
        await fresh_node.daemons.start(victim)
        await fresh_node.kubelet.wait_ready(HANDLER)
        assert await api.thaw(target) is True
    assert (await fresh_node.kubelet.stats(volume, target))[BYTES].used > 0
    assert await fresh_node.kubelet.expand(volume, target, 128 * MIB) == 128 * MIB
    assert await fresh_node.output("one", target, "cat /data/f") == "kept"
    await fresh_node.runtime.stop("one")
    await fresh_node.unpublish(volume, target)
    await fresh_node.kubelet.unstage(volume)
    assert not [
        device for device in loop.list_named(lambda _: True) if volume.volume_id in device.backing
    ]
    assert mountinfo.at(str(target)) is None


@pytest_asyncio.fixture
async def kept_node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    """A whole node whose claims are in keepers."""
    async with whole_node(runtime_options=("--claims", "keeper")) as node:
        yield node
        await node.tidy()


async def test_runtime_killed_with_its_keepers_has_its_claims_again(kept_node: WholeNode) -> None:
    """Until then nobody else gets the volume; then machine and proxy are killed. What was synced is there."""
    volume = await kept_node.volume()
    target = await kept_node.publish(volume)
    boot = await kept_node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; echo kept > /data/f; sync"
    )
    machine = await kept_node.qemu_pid("one")
    await kept_node.daemons.kill("runtime")
    await asyncio.to_thread(kill_all_keepers, _keeper_of(kept_node, "one"))
    unpublish, host = kept_node.kubelet.unpublish, kept_node.publish(volume, defer=False)
    lives = f"process {machine} of sandbox one"
    await refused(unpublish(volume, target), grpc.StatusCode.FAILED_PRECONDITION, lives)
    await refused(host, grpc.StatusCode.FAILED_PRECONDITION, str(target))
    await kept_node.daemons.start("runtime")
    await kept_node.kubelet.wait_ready(HANDLER)
    again = "cat /proc/sys/kernel/random/boot_id; cat /data/f"
    assert (await kept_node.output("one", target, again)).splitlines() == [boot, "kept"]
    await refused(unpublish(volume, target), grpc.StatusCode.FAILED_PRECONDITION, "for which")

    with keepers.connect(_keeper_of(kept_node, "one")) as line, processes.ending(*line.pids):
        processes.end(machine)
    await kept_node.daemons.kill("proxy")
    await kept_node.daemons.start("proxy")
    await kept_node.kubelet.wait_ready(HANDLER)
    assert await kept_node.output("two", target, "cat /data/f") == "kept"


def _keeper_of(node: WholeNode, sandbox: str) -> Path:
    return node.daemons.paths.kata_run / "sandboxes" / sandbox / "keeper.sock"


COMMAND = (
    f"{sys.executable} -m examples.kata conformance --handlers-socket {{registry}} "
    "--volumes-root {directory}/volumes --run-dir {directory}/kata --boot-timeout-s 240"
)
NOT_OFFERED_BY_ALL = {
    "R-212",  # it has READ_ONLY,
    "R-213",  # IO_LIMITS,
    "R-214",  # GROUP,
    "R-215",
    "R-217",  # FORMAT,
    "R-219",  # LUKS,
    "R-220",  # SUB_PATH,
    "R-307",  # and FREEZE
}
"""Cases for runtimes that lack a feature."""
NEED_A_KEEPER = {
    *("R-110", "R-111", "R-112", "R-113"),
    *("R-125", "R-126", "R-127", "R-128"),
}


def outcomes(command: str, cases: str, report: Path) -> dict[str, str]:
    """The outcome of each of these cases of the suite for runtimes, with a runtime that the command starts."""
    flags = ["--runtime", command, "--only", cases, "--timeout-s", "300", "--json", str(report)]
    ran = CliRunner().invoke(main, [*flags])
    assert ran.exit_code == 0, ran.output
    return {case["number"]: case["outcome"] for case in json.loads(report.read_text())["cases"]}


@pytest.mark.spec("H-48")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", ["R-100..R-199", "R-200..R-299", "R-300..R-399"])
def test_example_microvm_runtime_breaks_no_duty(tmp_path: Path, cases: str) -> None:
    assert outcomes(COMMAND, cases, tmp_path / "report.json") == {
        number: "skipped" if number in NOT_OFFERED_BY_ALL | NEED_A_KEEPER else "passed"
        for number in catalogue.cases("R")
        if number[2] == cases[2]
    }


@pytest.mark.timeout(1800)
def test_its_keepers_break_no_duty(tmp_path: Path) -> None:
    command, cases = f"{COMMAND} --claims keeper", ",".join(sorted(NEED_A_KEEPER))
    outcome_of = outcomes(command, cases, tmp_path / "report.json")
    assert outcome_of == dict.fromkeys(NEED_A_KEEPER, "passed")
