"""The keeper holds a claim exactly as long as the VM lives, whichever process is killed."""

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.handoff.store import Store
from crust.runtime_handler import keeper
from crust.runtime_handler.blocking import Claim, claim_volume, keepers, process_of
from tests.integration.runtime_handler.conftest import (
    TWO,
    MakeDevice,
    is_held,
    record_of,
    vm_process,
)
from tests.support import processes
from tests.support.raised import raised
from tests.support.records.records import HANDLER, TARGET
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.root


def _held(socket: Path) -> tuple[dict[str, int], tuple[int, ...]]:
    with keepers.connect(socket) as line:
        return line.held(), line.pids


@pytest.mark.spec("H-43")
def test_claim_outlives_the_daemon_and_ends_with_the_vm(
    store: Store, device: MakeDevice, process: subprocess.Popen[bytes], socket: Path
) -> None:
    """The daemon is a process of its own here, which is killed with its group after it gave the claim away."""
    volume = device("a")
    store.write(record_of(volume, TARGET))
    daemon = f"""
import os, signal
from pathlib import Path
from crust.core import volumes
from crust.runtime_handler.blocking import claim_volume, keepers, process_of
target = volumes.TargetPath.parse({TARGET.text!r})
claim = claim_volume({store.root!r}, target, volumes.SandboxId("sandbox-1"), volumes.HandlerName({HANDLER!r}))
keepers.start(Path({str(socket)!r}), process_of({process.pid})).hold("volume", claim.fds)
os.killpg(0, signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", daemon], start_new_session=True, check=False, timeout=60)
    assert is_held(store, volume.path)
    held, pids = _held(socket)
    assert held == {"volume": 2}
    with processes.ending(*pids):
        process.kill()
    assert not is_held(store, volume.path)
    with pytest.raises(keepers.KeeperGone):
        keepers.connect(socket)
    claim_volume(store.root, TARGET, TWO, HANDLER).release()


@pytest.mark.spec("H-45")
def test_keeper_or_standby_killed_releases_nothing(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    with keepers.start(socket, process_of(process.pid)) as line:
        line.hold("volume", claim.fds)
    claim.hand_over(*line.pids)
    seen: set[int] = set()
    for number in range(12):
        held, pids = _held(socket)
        assert held == {"volume": 2}
        assert len(set(pids)) == 2
        seen |= set(pids)
        processes.end(pids[number % 2])
        assert is_held(store, claim.record.device)
    assert len(seen) == 13, "the other one succeeded each time"
    with keepers.connect(socket) as line:
        line.release("volume")
    assert not is_held(store, claim.record.device)


@pytest.mark.spec("H-45")
def test_standby_stays_one_for_as_long_as_its_keeper_lives(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    """Before the first volume, and after each succession: what must not happen would happen within a second."""
    keepers.start(socket, process_of(process.pid)).close()
    for killed in (None, 1, 0):
        before = _held(socket)
        if killed is not None:
            processes.end(before[1][killed])
        _, pids = _held(socket)
        assert not _children_within(2.5, pids[1]), "the standby has one of its own"
        assert {_held(socket)[1] for _ in range(4)} == {pids}
    with keepers.connect(socket) as line:
        line.hold("volume", claim.fds)
    claim.hand_over(*line.pids)
    processes.end(line.pids[0])
    assert is_held(store, claim.record.device)
    assert _held(socket)[0] == {"volume": 2}


def _children_within(seconds: float, pid: int) -> str:
    end = os.pidfd_open(pid)
    assert not select.select([end], [], [], seconds)[0], "it has ended"
    os.close(end)
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.mark.spec("H-45")
def test_change_is_not_answered_before_the_standby_has_it(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    """The keeper has one descriptor left, which the change takes; it needs another to fork a standby."""
    with keepers.start(socket, process_of(process.pid)) as line:
        line.hold("before", claim.fds)
        claim.hand_over(*line.pids)
        used = {int(descriptor) for descriptor in os.listdir(f"/proc/{line.pid}/fd")}
        limits = resource.prlimit(line.pid, resource.RLIMIT_NOFILE)
        least_free = min(set(range(len(used) + 1)) - used)
        resource.prlimit(line.pid, resource.RLIMIT_NOFILE, (least_free + 1, limits[1]))
        line._line.settimeout(1)
        with open(os.devnull, "rb") as other, pytest.raises(keepers.KeeperNotResponding):
            line.hold("other", [other.fileno()])
        resource.prlimit(line.pid, resource.RLIMIT_NOFILE, limits)
        line._line.settimeout(20)
        assert _answer(line)
        assert line.held() == {"before": 2, "other": 1}
        processes.end(line.pid)
    assert _held(socket)[0] == {"before": 2, "other": 1}
    assert is_held(store, claim.record.device)


@pytest.mark.spec("H-45")
def test_keeper_killed_during_a_change_holds_what_it_answered(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    """A change is answered when keeper and standby have it; without an answer it may have happened or not."""
    line = keepers.start(socket, process_of(process.pid))
    line.hold("volume", claim.fds)
    claim.hand_over(*line.pids)
    for number in range(30):
        with open(os.devnull, "rb") as other:
            line._line.sendmsg(*_hold(f"other{number}", other.fileno()))
            processes.end(line.pid)
        answered = _answer(line)
        line.close()
        line = keepers.connect(socket)
        held = line.held()
        assert held["volume"] == 2
        assert not answered or held[f"other{number}"] == 1
    line.close()
    assert is_held(store, claim.record.device)


def _hold(name: str, fd: int) -> tuple[list[bytes], list[tuple[int, int, bytes]]]:
    import array
    import json
    import socket as sockets

    request = json.dumps({"op": "hold", "name": name}).encode() + b"\n"
    return [request], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [fd]).tobytes())]


def _answer(line: keepers.Keeper) -> bool:
    try:
        return bool(line._line.recv(4096))
    except OSError:
        return False


@pytest.mark.spec("H-46")
def test_both_keepers_killed_break_connection_and_free_claim(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    with keepers.start(socket, process_of(process.pid)) as line:
        line.hold("volume", claim.fds)
        claim.hand_over(*line.pids)
        kill_all_keepers(socket)
        assert select.select([line], [], [], 20)[0], "a runtime that waits is told"
        with pytest.raises(keepers.KeeperGone, match="if the VM runs"):
            line.held()
    assert not is_held(store, claim.record.device)


@pytest.mark.spec("H-44")
def test_keeper_is_small_ignores_daemons_signals_and_imports_no_package(
    process: subprocess.Popen[bytes], socket: Path
) -> None:
    with keepers.start(socket, process_of(process.pid)) as line:
        before = line.pids
        for pid in before:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        line.held()
        assert line.pids == before
        maps = Path(f"/proc/{line.pid}/maps").read_text()
        assert "site-packages" not in maps
        (rss,) = (
            int(row.split()[1])
            for row in Path(f"/proc/{line.pid}/status").read_text().splitlines()
            if row.startswith("VmRSS:")
        )
        assert rss < 16 * 1024
        assert os.getsid(line.pid) != os.getsid(0)
    assert "crust" not in Path(keeper.__file__).read_text().split('"""')[2]


def test_start_for_a_vm_that_has_ended_fails(socket: Path) -> None:
    with vm_process() as process:
        ended = process_of(process.pid)
    with pytest.raises(errors.NotFound, match="has ended"):
        keepers.start(socket, ended)
    assert not socket.exists()


def test_keeper_of_another_version_refuses_by_name(
    process: subprocess.Popen[bytes], socket: Path
) -> None:
    with (
        keepers.start(socket, process_of(process.pid)) as line,
        raised("KeeperRefused", match="unknown request"),
    ):
        line._ask({"op": "invented"})


def test_start_beside_a_running_keeper_finds_it(
    process: subprocess.Popen[bytes], socket: Path
) -> None:
    """Another one's socket would take its place, and what it holds could only be released by the VM's end."""
    with (
        keepers.start(socket, process_of(process.pid)) as line,
        keepers.start(socket, process_of(process.pid)) as again,
    ):
        assert again.pids == line.pids
        with vm_process() as another, raised("KeeperRuns", match=str(line.pid)):
            keepers.start(socket, process_of(another.pid))
        assert line.held() == {}
