"""An upgrade and the way back, by the pages, under a sandbox that has a volume and a pod that writes to another one.

In `make test` the earlier build is this tree with an earlier version, and the sandbox is a process: what pip, systemd
and the daemons do at an upgrade. In `make upgrade` it is the build of an earlier commit, pip's lines are run as they
stand, by pip without an index, and the sandbox is a microVM. Layouts of earlier commits are tested by frozen data
(tests/data/pools, tests/data/nodes).
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from crust.blockdriver.engines.files import pool
from crust.core import volumes
from crust.handoff.store import Store
from tests.integration.systemd import test_installed
from tests.integration.systemd.test_installed import PAGE, documented
from tests.support import booted_systemd, capabilities, environments
from tests.support.booted_systemd import CHECKOUT, ENVIRONMENT, Machine
from tests.support.faults.refusals import refused
from tests.support.forms import of_guests
from tests.support.forms.form import KUBELET, TARGET, staged
from tests.support.forms.units import Units

pytestmark = pytest.mark.root

EARLIER = "0.1.dev1"
COMMIT = "615a01bd"
"""The first that knows the immutable directories below guard mounts (decision 42): an earlier one cannot unpublish on
the way back.
"""
IS_WHOLE = os.environ.get("TESTS_UPGRADE") == "all"
SLOW_S = 600.0
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


def commit() -> str:
    """That of the earlier build of `make upgrade`. Raises `AssertionError` in a clone that lacks it."""
    chosen = os.environ.get("TESTS_UPGRADE_FROM") or COMMIT
    shallow = environments.do("git", "-C", CHECKOUT, "rev-parse", "--is-shallow-repository")
    known = ["git", "-C", str(CHECKOUT), "cat-file", "-e", f"{chosen}^{{commit}}"]
    is_known = subprocess.run(known, check=False, capture_output=True).returncode == 0
    assert is_known, f"{chosen} is not in this clone; is it shallow: {shallow}"
    return chosen


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One on which the earlier build is installed and serves."""
    capabilities.need("mount", "loop", "systemd", *(("vm",) if IS_WHOLE else ()))
    earlier = commit() if IS_WHOLE else ""
    with booted_systemd.machine() as booted:
        opt = booted.root / "opt"
        for version in ("earlier", "later"):
            (opt / version).mkdir()
        environments.build_wheel(opt / "earlier", named=EARLIER, commit=earlier)
        (own,) = opt.glob("crust_csi-*.whl")
        own.rename(opt / "later" / own.name)
        if IS_WHOLE:
            booted.output("rm", "-r", ENVIRONMENT)
            give_packages(opt / "earlier", earlier)
            give_packages(opt / "later", "HEAD")
        for line in documented("As units of systemd"):
            run(booted, "earlier", line)
        yield booted


def give_packages(directory: Path, commit: str) -> None:
    """What `make wheel` of a commit writes beside the wheel, and the packages by the page's line."""
    listed = environments.do("git", "-C", CHECKOUT, "show", f"{commit}:deploy/requirements.txt")
    (directory / "requirements.txt").write_text(listed)
    environments.do(
        "env", f"--chdir={directory}", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}",
        "sh", "-c", page_line("python3 -m pip download "),
    )  # fmt: skip


def page_line(begins: str) -> str:
    (line,) = re.findall(rf"(?m)^    ({re.escape(begins)}.*)$", PAGE)
    return str(line)


def run(machine: Machine, version: str, line: str) -> None:
    """A line of the pages, in the directory that has the files of a version."""
    directory = f"/opt/{version}"
    if not IS_WHOLE:
        test_installed.run(machine, line, directory)
        return
    offline = page_line("export PIP_NO_INDEX")
    machine.output("sh", "-c", f"cd {directory} && {offline} && {line}", timeout_s=SLOW_S)


def install(machine: Machine, version: str) -> None:
    """The page's lines with pip."""
    for line in documented("Upgrade"):
        if "pip install" in line:
            run(machine, version, line)


def restart(machine: Machine, version: str) -> None:
    """The page's other lines."""
    for line in documented("Upgrade"):
        if "pip install" not in line:
            run(machine, version, line)


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
    async with staged(units, runtime=of_guests.runtime(units) if IS_WHOLE else None) as volume:
        co = volume.co
        await volume.publish()
        entry = Store(units.seen("/run/crust/volumes")).read(volumes.TargetPath(TARGET))
        assert entry is not None
        other = (await co.create("other")).volume_id
        await co.stage(other, HOST_STAGING)
        await co.publish(other, HOST_TARGET, defer=False, staging=HOST_STAGING)
        with (
            sandbox(units) as is_alive,
            machine.running("sh", "-c", WRITES.format(target=HOST_TARGET)),
        ):
            for version, number in (("later", environments.version()), ("earlier", EARLIER)):
                before, pid = version_of(machine), units.main_pid("crust-node")
                install(machine, version)
                shown = machine.run("crust", "doctor", "--check", "versions").stdout
                assert f"runs {before}, installed is {number}" in shown, shown
                restart(machine, version)
                assert units.main_pid("crust-node") != pid
                assert f"runs {number}" in machine.output("crust", "doctor", "--check", "versions")
                shown = machine.output("crust", "volumes", "-o", "wide")
                assert entry.require().device in shown
                unpublish = volume.unpublish()
                await refused(unpublish, grpc.StatusCode.FAILED_PRECONDITION, "HeldBySandbox")
                written = lines(machine)
                assert await asyncio.to_thread(wait_for_more_than, written, machine)
                assert await asyncio.to_thread(is_alive)
        await co.unpublish(other, HOST_TARGET)
        await co.unstage(other, HOST_STAGING)
        await co.delete(other)
        await volume.unpublish()


@contextmanager
def sandbox(units: Units) -> Iterator[Callable[[], bool]]:
    """A microVM that writes to the volume, or a process that has claimed it; whether it goes on. That blocks."""
    if IS_WHOLE:
        with of_guests.guest(units, of_guests.WRITE_ON) as guest:
            yield partial(of_guests.writes_on, guest)
    else:
        with units.sandbox():
            yield lambda: True  # the block fails at its end if the process has ended


def renumber(machine: Machine, there: int) -> None:
    """Give the pool another schema number."""
    swap = f's/"schema":[0-9]*/"schema":{there}/'
    machine.output("sed", "--in-place", swap, POOL)


def test_way_back_over_raised_layout_is_refused_before_a_restart(machine: Machine) -> None:
    """The pool has a number that the installed version does not know."""
    install(machine, "later")
    restart(machine, "later")
    pid, later = Units(machine).main_pid("crust-node"), pool.SCHEMA + 1
    (number,) = machine.output("sed", "--quiet", 's/.*"schema":\\([0-9]*\\).*/\\1/p', POOL).split()
    renumber(machine, later)
    with pytest.raises(AssertionError, match=f"SettingsRefused.*schema {later}"):
        restart(machine, "later")
    assert Units(machine).main_pid("crust-node") == pid
    renumber(machine, int(number))
    restart(machine, "later")
    assert Units(machine).main_pid("crust-node") != pid
