"""An upgrade and the way back, by the page, under a sandbox that has a volume and a pod that writes to another one.

The earlier build is this tree with an earlier version: what pip, systemd and the daemons do at an upgrade. Layouts of
earlier commits are tested by frozen data (tests/data/pools, tests/data/nodes). `make upgrade FROM=<commit>` takes a
build of an earlier commit. It must know the immutable directories below guard mounts (decision 42): any other cannot
unpublish on the way back.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from crust.blockdriver.engines.files import pool
from tests.integration.systemd.test_installed import follow
from tests.support import booted_systemd, capabilities, environments
from tests.support.booted_systemd import CHECKOUT, ENVIRONMENT, Machine
from tests.support.faults.refusals import refused
from tests.support.forms.form import KUBELET, staged
from tests.support.forms.units import Units

pytestmark = pytest.mark.root

EARLIER = "0.1.dev1"
POOL = "/var/lib/crust/block/pool.json"
HOST_STAGING, HOST_TARGET = (
    f"{KUBELET}/plugins/kubernetes.io/csi/w/globalmount",
    f"{KUBELET}/pods/q/mount",
)
WRITES = "while :; do date +%s%N >>{target}/lines; sync {target}/lines; done"


class Upgraded(Units):
    """Units beside a runtime that has an SDK of its own, which stays."""

    @property
    def python(self) -> str:
        return f"{CHECKOUT}/.venv/bin/python"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One on which the earlier build is installed and serves."""
    capabilities.need("mount", "loop", "systemd")
    with booted_systemd.machine() as booted:
        for version in ("earlier", "later"):
            (booted.root / "opt" / version).mkdir()
        environments.build_wheel(
            booted.root / "opt/earlier",
            named=EARLIER,
            commit=os.environ.get("TESTS_UPGRADE_FROM", ""),
        )
        (own,) = (booted.root / "opt").glob("crust_csi-*.whl")
        own.rename(booted.root / "opt/later" / own.name)
        install(booted, "earlier")
        follow(booted, "As units of systemd")
        yield booted


def install(machine: Machine, version: str) -> None:
    """The page's line with pip, for a machine without network."""
    (wheel,) = (machine.root / "opt" / version).glob("*.whl")
    pip = f"{sys.executable} -m pip --quiet --disable-pip-version-check"
    line = f"{pip} --python {ENVIRONMENT}/bin/python install --no-deps /opt/{version}/{wheel.name}"
    machine.output("sh", "-ec", f"cd /; {line}")


def version_of(machine: Machine) -> str:
    return machine.output("crust", "--version").split()[-1]


def lines(machine: Machine) -> int:
    """How many lines the pod on the host has written, as the machine sees its volume."""
    return int(machine.output("sh", "-c", f"wc --lines <{HOST_TARGET}/lines"))


def wait_for_more_than(written: int, machine: Machine) -> bool:
    """Until the pod has written more. Blocks."""
    follow_lines = f"tail --lines=+{written + 1} --follow {HOST_TARGET}/lines"
    with machine.running("sh", "-c", follow_lines) as tail:
        assert tail.stdout is not None
        return bool(tail.stdout.readline())


async def test_upgrade_and_way_back_leave_volumes_in_use(machine: Machine) -> None:
    for path in (HOST_STAGING, str(Path(HOST_TARGET).parent)):
        machine.output("mkdir", "-p", path)
    units = Upgraded(machine)
    async with staged(units) as volume:
        co = volume.co
        await volume.publish()
        other = (await co.create("other")).volume_id
        await co.stage(other, HOST_STAGING)
        await co.publish(other, HOST_TARGET, defer=False, staging=HOST_STAGING)
        with (
            units.sandbox() as device,
            machine.running("sh", "-c", WRITES.format(target=HOST_TARGET)),
        ):
            for version, number in (("later", environments.version()), ("earlier", EARLIER)):
                before, pid = version_of(machine), units.main_pid("crust-node")
                install(machine, version)
                shown = machine.run("crust", "doctor", "--check", "versions").stdout
                assert f"runs {before}, installed is {number}" in shown, shown
                follow(machine, "Upgrade")
                assert units.main_pid("crust-node") != pid
                assert f"runs {number}" in machine.output("crust", "doctor", "--check", "versions")
                assert device in machine.output("crust", "volumes", "-o", "wide")
                unpublish = volume.unpublish()
                await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "HeldBySandbox")
                written = lines(machine)
                assert await asyncio.to_thread(wait_for_more_than, written, machine)
        await co.unpublish(other, HOST_TARGET)
        await co.unstage(other, HOST_STAGING)
        await co.delete(other)
        await volume.unpublish()


def renumber(machine: Machine, there: int) -> None:
    """Give the pool another schema number."""
    swap = f's/"schema":[0-9]*/"schema":{there}/'
    machine.output("sed", "--in-place", swap, POOL)


def test_way_back_over_raised_layout_is_refused_before_a_restart(machine: Machine) -> None:
    """The pool has a number that the installed version does not know."""
    install(machine, "later")
    follow(machine, "Upgrade")
    pid, later = Units(machine).main_pid("crust-node"), pool.SCHEMA + 1
    (number,) = machine.output("sed", "--quiet", 's/.*"schema":\\([0-9]*\\).*/\\1/p', POOL).split()
    renumber(machine, later)
    with pytest.raises(AssertionError, match=f"SettingsRefused.*schema {later}"):
        follow(machine, "Upgrade")
    assert Units(machine).main_pid("crust-node") == pid
    renumber(machine, int(number))
    follow(machine, "Upgrade")
    assert Units(machine).main_pid("crust-node") != pid
