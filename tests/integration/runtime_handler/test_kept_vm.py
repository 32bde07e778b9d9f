"""Keeper and standby are killed while the VM lives: nobody else gets its volumes, it gets its claims again (H-46)."""

import contextlib
import errno
import itertools
import os
import resource
import signal
import socket as sockets
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.runtime_handler.blocking import (
    Claim,
    ClaimedSince,
    ClaimLost,
    Process,
    adopt_volume,
    claim_volume,
    keepers,
    kept_vm,
    process_of,
)
from tests.integration.runtime_handler.conftest import (
    ONE,
    TWO,
    MakeDevice,
    is_held,
    record_of,
    vm_process,
)
from tests.support import processes
from tests.support.records.records import HANDLER, TARGET
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = [pytest.mark.root, pytest.mark.spec("H-46")]

OTHER = volumes.TargetPath.parse("/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/other/mount")


@pytest.fixture
def vm(store: Store, process: subprocess.Popen[bytes], socket: Path) -> kept_vm.KeptVm:
    return kept_vm.KeptVm(store.root, HANDLER, ONE, process_of(process.pid), socket)


@pytest.fixture
def record(claim: Claim, vm: kept_vm.KeptVm) -> Record:
    """A volume that the VM has mounted, and whose claim its keeper holds."""
    with keepers.start(vm.socket, vm.process) as line:
        line.hold("a", claim.fds)
    claim.report_mounted()
    claim.hand_over(*line.pids)
    return claim.record


def test_claims_are_retaken_by_another_keeper_until_vm_ends(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    before = claims.read(store.layout.entry(TARGET))
    killed = kill_all_keepers(vm.socket)
    assert not is_held(store, record.device)
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}
        assert set(line.pids).isdisjoint(killed)
        pids = line.pids
    assert is_held(store, record.device)
    after = claims.read(store.layout.entry(TARGET))
    assert before is not None
    assert after is not None
    assert (after.sandbox_id, after.state) == (ONE, State.MOUNTED)
    assert after.claimed_at == before.claimed_at, "it is the same claim"
    with processes.ending(*pids):
        process.kill()
    claim_volume(store.root, TARGET, TWO, HANDLER).release()


def _lose_claim(store: Store) -> None:
    """claim.json is gone, as by a person's hand: nothing says which process has the volume."""
    os.unlink(store.layout.entry(TARGET).claim)


@pytest.mark.spec("H-23")
def test_volume_of_living_vm_is_refused_to_another_sandbox(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    before = claims.read(store.layout.entry(TARGET))
    with pytest.raises(claims.HypervisorLives, match=f"process {process.pid} of sandbox sandbox-1"):
        claim_volume(store.root, TARGET, TWO, HANDLER)
    assert claims.read(store.layout.entry(TARGET)) == before
    assert not is_held(store, record.device)
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}
    assert process.poll() is None


@pytest.mark.spec("H-17")
def test_volume_of_living_vm_is_not_unpublished(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    before = claims.read(store.layout.entry(TARGET))
    for _ in range(2):
        with pytest.raises(claims.HypervisorLives, match="sandbox-1"):
            store.begin_removal(TARGET)
    assert claims.read(store.layout.entry(TARGET)) == before
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}
    assert process.poll() is None
    with processes.ending(*line.pids):
        process.kill()
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()


def test_vm_is_killed_where_another_sandbox_has_its_volume(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    _lose_claim(store)
    with claim_volume(store.root, TARGET, TWO, HANDLER) as other:
        other.report_mounted()
        with pytest.raises(kept_vm.VmKilled, match="sandbox-2"):
            vm.recover({"a": TARGET})
        assert process.wait() == -signal.SIGKILL
        written = claims.read(store.layout.entry(TARGET))
        assert written is not None
        assert (written.sandbox_id, written.state, written.live) == (TWO, State.MOUNTED, True)


def test_vm_is_killed_where_claim_names_another_sandbox(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """The lock is free and the device the same: only claim.json tells that somebody else may have written to it."""
    kill_all_keepers(vm.socket)
    _lose_claim(store)
    claim_volume(store.root, TARGET, TWO, HANDLER).close()
    with pytest.raises(kept_vm.VmKilled) as raised:
        vm.recover({"a": TARGET})
    assert isinstance(raised.value.reason, ClaimedSince)
    assert process.wait() == -signal.SIGKILL
    assert not is_held(store, record.device)


def test_vm_whose_claim_is_lost_is_left_alone(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """Nobody is seen to have had the volume, and nobody knows."""
    kill_all_keepers(vm.socket)
    _lose_claim(store)
    with pytest.raises(ClaimLost, match="has no claim"):
        vm.recover({"a": TARGET})
    assert process.poll() is None
    assert not is_held(store, record.device)


def test_volume_that_is_lost_costs_neither_vm_nor_other_claims(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    with pytest.raises(claims.NotPublished):
        vm.recover({"a": TARGET, "gone": OTHER})
    assert process.poll() is None
    assert is_held(store, record.device)
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}


def test_unpublish_that_has_the_lock_costs_no_vm(
    store: Store,
    record: Record,
    vm: kept_vm.KeptVm,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_all_keepers(vm.socket)
    monkeypatch.setattr(kept_vm, "_STILL_OURS_S", 0.1)
    paths = store.layout.entry(TARGET)
    with claims.ClaimLock.acquire(paths, TARGET), pytest.raises(claims.HeldBySandbox):
        vm.recover({"a": TARGET})
    assert process.poll() is None
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}


def test_claimant_killed_with_lock_leaves_dead_claim_to_next(
    store: Store, record: Record, vm: kept_vm.KeptVm
) -> None:
    kill_all_keepers(vm.socket)
    before = claims.read(store.layout.entry(TARGET))
    claims.ClaimLock.acquire(store.layout.entry(TARGET), TARGET).close()  # as its end does
    assert claims.read(store.layout.entry(TARGET)) == before
    with pytest.raises(claims.HypervisorLives):
        claim_volume(store.root, TARGET, TWO, HANDLER)
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}


def test_pid_used_again_is_neither_claimed_for_nor_killed(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """The VM has ended, and a stranger has its number."""
    kill_all_keepers(vm.socket)
    ended = Process(process.pid, vm.process.started - 1)
    with pytest.raises(errors.NotFound, match="has ended"):
        replace(vm, process=ended).recover({"a": TARGET})
    assert process.poll() is None
    assert not is_held(store, record.device)


def test_process_of_no_claim_is_neither_claimed_for_nor_killed(
    store: Store, record: Record, vm: kept_vm.KeptVm
) -> None:
    kill_all_keepers(vm.socket)
    with vm_process() as stranger:
        named = process_of(stranger.pid)
        with pytest.raises(ClaimLost, match=f"names process {vm.process.pid}"):
            replace(vm, process=named).recover({"a": TARGET})
        assert stranger.poll() is None
    assert not is_held(store, record.device)


def test_recovery_without_a_free_descriptor_costs_no_vm(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """The number of free descriptors grows by one, until recovery succeeds: none of its failures is an answer."""
    kill_all_keepers(vm.socket)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused: list[type[errors.CrustError]] = []
    for free in range(64):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_with(free), limits[1]))
        try:
            vm.recover({"a": TARGET}).close()
            break
        except errors.CrustError as error:
            refused.append(type(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(refused) > 3
    assert not any(issubclass(kind, kept_vm.VmKilled | errors.NotFound) for kind in refused)
    assert process.poll() is None
    assert is_held(store, record.device)


def _limit_with(free: int) -> int:
    """The limit of descriptors below which so many are free: the process may have any others open."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    unused = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(unused, free, None))


def test_keeper_that_was_succeeded_by_its_standby_is_connected_to(
    store: Store, record: Record, vm: kept_vm.KeptVm
) -> None:
    with keepers.connect(vm.socket) as line:
        keeper, standby = line.pids
    os.kill(keeper, signal.SIGKILL)
    with vm.recover({"a": TARGET}) as line:
        assert line.pid == standby
        assert line.held() == {"a": 2}


@pytest.mark.parametrize("question", ["held", "hold"])
def test_keeper_killed_before_question_of_recovery_costs_no_vm(
    question: str,
    store: Store,
    record: Record,
    vm: kept_vm.KeptVm,
    process: subprocess.Popen[bytes],
    device: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its standby has the same claims, and is asked instead."""
    store.write(record_of(device("b"), OTHER))
    really = getattr(keepers.Keeper, question)
    killed: list[int] = []
    with keepers.connect(vm.socket) as present:
        keeper = present.pid

    def asked(line: keepers.Keeper, *arguments: object) -> object:
        if not killed:
            killed.append(keeper)
            processes.end(keeper)
        return really(line, *arguments)

    monkeypatch.setattr(keepers.Keeper, question, asked)
    claim_volume(store.root, OTHER, ONE, HANDLER, process=vm.process).close()
    with vm.recover({"a": TARGET, "b": OTHER}) as line:
        assert line.held() == {"a": 2, "b": 2}
        assert line.pid not in killed
    assert killed
    assert process.poll() is None


def test_recovery_that_was_killed_half_way_is_finished_by_next(
    store: Store, record: Record, vm: kept_vm.KeptVm, device: MakeDevice
) -> None:
    """The first daemon gave one of two claims to the new keeper, and died."""
    store.write(record_of(device("b"), OTHER))
    claim_volume(store.root, OTHER, ONE, HANDLER, process=vm.process).close()
    with vm.recover({"a": TARGET, "b": OTHER}) as line:
        assert line.held() == {"a": 2, "b": 2}


def test_claim_whose_lock_daemon_still_holds_gets_its_device_again(
    store: Store, record: Record, vm: kept_vm.KeptVm
) -> None:
    """A daemon that resumes a mount has a copy of the lock, and the keeper had the device."""
    with keepers.connect(vm.socket) as line:
        claim = adopt_volume(store.root, TARGET, ONE, HANDLER, line.pid)
    kill_all_keepers(vm.socket)
    with vm.recover({"a": TARGET}, {"a": claim}) as line:
        assert line.held() == {"a": 2}
    claim.hand_over(*line.pids)
    assert is_held(store, record.device)


@pytest.fixture
def stopped(record: Record, vm: kept_vm.KeptVm) -> Iterator[None]:
    """Keeper and standby are stopped."""
    with keepers.connect(vm.socket) as line:
        pids = line.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    with sockets.socket(sockets.AF_UNIX) as line:  # this waits until the queue is empty
        line.connect(str(vm.socket))
        line.sendall(b'{"op": "held"}\n')
        assert line.makefile().readline()


@pytest.mark.usefixtures("stopped")
def test_stopped_keepers_still_hold_and_vm_is_not_touched(
    store: Store,
    record: Record,
    vm: kept_vm.KeptVm,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepers, "_ANSWER_S", 0.1)
    with pytest.raises(keepers.KeeperNotResponding):
        vm.recover({"a": TARGET})
    assert process.poll() is None
    assert is_held(store, record.device)


@pytest.mark.usefixtures("stopped")
def test_stopped_keeper_whose_queue_is_full_still_holds(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """Each look of a daemon leaves a connection in the queue: the kernel answers the next one with EAGAIN."""
    with contextlib.ExitStack() as waiting:
        for _ in range(64):
            line = waiting.enter_context(sockets.socket(sockets.AF_UNIX))
            line.settimeout(0)
            if line.connect_ex(str(vm.socket)) == errno.EAGAIN:
                break
        else:
            pytest.fail("the queue has no end")
        with pytest.raises(keepers.KeeperNotResponding):
            vm.recover({"a": TARGET})
        with pytest.raises(keepers.KeeperNotResponding):
            keepers.start(vm.socket, vm.process)
    assert process.poll() is None
    assert is_held(store, record.device)


def test_vm_that_ended_by_itself_is_distinguished_from_killed_one(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    with keepers.connect(vm.socket) as line, processes.ending(*line.pids):
        process.kill()
    # not reaped: its number is still its own
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(errors.NotFound, match="has ended"):
        vm.recover({"a": TARGET, "gone": OTHER})
