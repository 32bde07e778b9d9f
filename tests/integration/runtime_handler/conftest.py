"""A handoff directory, loop devices that records can name, a directory short enough for sockets, and hypervisors."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crust.core import volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import devices, holders, loop
from crust.runtime_handler.blocking import Claim, claim_volume, keepers, process_of
from tests.integration.conftest import MakeDevice as MakeDevice
from tests.support import processes, trees
from tests.support.records.records import HANDLER, MOUNT, TARGET, a_record

ONE = volumes.SandboxId("sandbox-1")
TWO = volumes.SandboxId("sandbox-2")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/run/volumes")
    made.open()
    return made


@pytest.fixture
def run_dir(short_dir: Path) -> str:
    """A directory for sockets."""
    return str(short_dir)


def record_of(
    attached: loop.LoopDevice, target: volumes.TargetPath | str, *, readonly: bool = False
) -> Record:
    """A record of a real device."""
    record = a_record(target, readonly=readonly)
    source = volumes.BlockSource(attached.path, attached.identity)
    return record.replaced(replace(MOUNT, source=source, readonly=readonly, group=None))


@dataclass
class Hypervisor:
    """A process in the place of a VM, and the processes that hold its claim."""

    process: subprocess.Popen[bytes]
    holders: tuple[int, ...]

    @property
    def holder_pid(self) -> int:
        """The process whose descriptor proves the claim."""
        return self.holders[0]

    def kill(self) -> None:
        """Kill it, and wait until it and what lives with it have ended."""
        with processes.ending(*self.holders):
            self.process.kill()
            self.process.wait()


StartHypervisor = Callable[[Claim], AbstractContextManager[Hypervisor]]


@contextmanager
def vm_process(*fds: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that inherits `fds`, and dies with the block."""
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=fds) as process:
        yield process
        process.kill()


@pytest.fixture
def socket(run_dir: str) -> Path:
    """The socket of a VM's keeper."""
    return Path(run_dir) / "keeper.sock"


@pytest.fixture
def process(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A VM's process; the keepers at the socket end with it, before the next test begins."""
    with vm_process() as process:
        yield process
        pids: tuple[int, ...] = ()
        with suppress(keepers.KeeperGone), keepers.connect(socket) as line:
            pids = line.pids
        with processes.ending(*pids):
            process.kill()


@pytest.fixture
def claim(store: Store, device: MakeDevice, process: subprocess.Popen[bytes]) -> Claim:
    """A claim for the VM's process, whose descriptors this process has."""
    store.write(record_of(device("a"), TARGET))
    return claim_volume(store.root, TARGET, ONE, HANDLER, process=process_of(process.pid))


def is_held(store: Store, device: str) -> bool:
    """Whether both the lock and the exclusive open are held; they are never held by halves."""
    locked = claims.is_held(store.layout.entry(TARGET))
    try:
        os.close(devices.open_exclusive(device))
        is_open = False
    except holders.DeviceInUse:
        is_open = True
    assert locked == is_open
    return locked


@contextmanager
def _inheriting(claim: Claim) -> Iterator[Hypervisor]:
    with vm_process(*claim.fds) as process:
        claim.hand_over(process.pid)
        yield Hypervisor(process, (process.pid,))


@contextmanager
def _with_keeper(claim: Claim) -> Iterator[Hypervisor]:
    directory = Path(tempfile.mkdtemp(prefix="crust-"))
    with vm_process() as process:
        with keepers.start(directory / "keeper.sock", process_of(process.pid)) as keeper:
            keeper.hold("volume", claim.fds)
        claim.hand_over(*keeper.pids)
        yield Hypervisor(process, keeper.pids)
    trees.remove(directory)


@pytest.fixture(params=[_inheriting, _with_keeper], ids=["descriptors", "keeper"])
def hypervisor_of(request: pytest.FixtureRequest) -> StartHypervisor:
    """Start a hypervisor that has a claim: both ways in which a claim is proved to live."""
    start: StartHypervisor = request.param
    return start
