"""A process that the kernel hides: it refuses each check of a device, unless its control group is excepted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.host.mounts import mountinfo
from tests.integration.conftest import MakeDevice
from tests.support import capabilities

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[4]
HOLDER = """
import os, sys, time
with open(sys.argv[2] + "/cgroup.procs", "w") as group:
    group.write("0")
held = os.open(sys.argv[1], os.O_RDWR)
print(flush=True)
time.sleep(1000)
"""
LOOKER = """
import sys
from crust.host.answers import NotSeen
from crust.host.block import devices, openers, users
from crust.host.process import hidden
hidden.except_groups(sys.argv[3:])
try:
    users.check(devices.source(sys.argv[1]), users.Purpose.GUEST_WRITES)
    openers.opened_by(int(sys.argv[2]), [devices.source(sys.argv[1]).identity])
except NotSeen as error:
    print(error)
"""
INIT = f"""
import subprocess, sys
disk, group, *excepted = sys.argv[1:]
command = [sys.executable, "-c", {HOLDER!r}, disk, group]
with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
    holder.stdout.read(1)
    less = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    looker = [sys.executable, "-c", {LOOKER!r}, disk, str(holder.pid), *excepted]
    subprocess.run([*less, *looker], check=True)
    holder.kill()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the unified hierarchy."""
    capabilities.need("cgroups")
    top = next(mount.target for mount in mountinfo.read_all() if mount.fs_type == "cgroup2")
    made = Path(top, f"crust-test-{os.getpid()}", "agent")
    made.mkdir(parents=True)
    yield made
    made.rmdir()
    made.parent.rmdir()


def _said(disk: str, group: Path, *excepted: str) -> str:
    """What a process without CAP_SYS_PTRACE, beside init and the holder alone, says of the device."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", INIT]
    arguments = [disk, str(group), *excepted]
    ran = subprocess.run(
        [*command, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return ran.stdout


def test_hidden_process_outside_the_excepted_group_refuses(device: MakeDevice, group: Path) -> None:
    name, disk = group.parent.name, device("disk").path
    for excepted in ((), ("/other",), (f"/{name[:-1]}",), (f"/{name}/agent/below",)):
        said = _said(disk, group, *excepted)
        assert "cannot see the open files of all processes" in said
        assert f"in the control group /{name}/agent" in said
        assert "excepted_groups" in said


def test_hidden_process_of_excepted_group_refuses_nothing(device: MakeDevice, group: Path) -> None:
    """The look passes over it; a question about that process alone still has no answer."""
    disk = device("disk").path
    for excepted in (f"/{group.parent.name}/agent", f"/{group.parent.name}"):
        said = _said(disk, group, excepted)
        assert "cannot see the open files of all processes" not in said
        assert "cannot see the open files of process" in said
