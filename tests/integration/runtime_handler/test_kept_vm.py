"""Keeper and standby are killed while the VM lives: its claims are had again, or it is killed (H-46)."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.runtime_handler import Claim, ClaimLost, adopt_volume, claim_volume, keepers, kept_vm
from tests.integration.runtime_handler.conftest import ONE, TWO, MakeDevice, is_held, record_of
from tests.support import processes
from tests.support.records.records import HANDLER, TARGET, nothing_to_grow
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = [pytest.mark.root, pytest.mark.spec("H-46")]

OTHER = volumes.TargetPath.parse("/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/other/mount")


@pytest.fixture
def vm(store: Store, process: subprocess.Popen[bytes], socket: Path) -> kept_vm.KeptVm:
    return kept_vm.KeptVm(store.root, HANDLER, ONE, process.pid, socket)


@pytest.fixture
def record(claim: Claim, vm: kept_vm.KeptVm) -> Record:
    """A volume that the VM has mounted, and whose claim its keeper holds."""
    with keepers.start(vm.socket, vm.pid) as line:
        line.hold("a", claim.fds)
    asyncio.run(claim.mounted(nothing_to_grow))
    claim.hand_over()
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


def test_vm_is_killed_where_another_sandbox_has_its_volume(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    with claim_volume(store.root, TARGET, TWO, HANDLER) as other:
        asyncio.run(other.mounted(nothing_to_grow))
        with pytest.raises(kept_vm.VmKilled, match="sandbox-2"):
            vm.recover({"a": TARGET})
        assert process.wait() == -signal.SIGKILL
        written = claims.read(store.layout.entry(TARGET))
        assert written is not None
        assert (written.sandbox_id, written.state, written.live) == (TWO, State.MOUNTED, True)


@pytest.mark.spec("H-46")
def test_vm_is_killed_where_another_sandbox_had_its_volume(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    """The lock is free and the device the same: only claim.json tells that somebody else wrote to it."""
    kill_all_keepers(vm.socket)
    claim_volume(store.root, TARGET, TWO, HANDLER).release()
    with pytest.raises(kept_vm.VmKilled) as raised:
        vm.recover({"a": TARGET})
    assert isinstance(raised.value.reason, ClaimLost)
    assert process.wait() == -signal.SIGKILL
    assert not is_held(store, record.device)


def test_vm_is_killed_if_volume_was_unpublished_or_published_again(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    store.begin_removal(TARGET).complete()
    store.write(record)
    with pytest.raises(kept_vm.VmKilled):
        vm.recover({"a": TARGET})
    assert process.wait() == -signal.SIGKILL


def test_one_volume_that_is_lost_kills_vm_and_frees_others(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    kill_all_keepers(vm.socket)
    with pytest.raises(kept_vm.VmKilled) as raised:
        vm.recover({"a": TARGET, "gone": OTHER})
    assert isinstance(raised.value.reason, claims.NotPublished)
    assert process.wait() == -signal.SIGKILL
    claim_volume(store.root, TARGET, TWO, HANDLER).release()


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

    def asked(line: keepers.Keeper, *arguments: object) -> object:
        if line.pids and not killed:
            killed.append(line.pid)
            processes.end(line.pid)
        return really(line, *arguments)

    monkeypatch.setattr(keepers.Keeper, question, asked)
    claim_volume(store.root, OTHER, ONE, HANDLER).hand_over()
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
    claim = claim_volume(store.root, OTHER, ONE, HANDLER)
    claim.hand_over()
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
    claim.hand_over()
    assert is_held(store, record.device)


def test_stopped_keepers_still_hold_and_vm_is_not_touched(
    store: Store,
    record: Record,
    vm: kept_vm.KeptVm,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with keepers.connect(vm.socket) as line:
        pids = line.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(keepers, "_ANSWER_S", 0.1)
            with pytest.raises(keepers.KeeperNotResponding):
                vm.recover({"a": TARGET})
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert process.poll() is None
    assert is_held(store, record.device)


def test_vm_that_ended_by_itself_is_distinguished_from_killed_one(
    store: Store, record: Record, vm: kept_vm.KeptVm, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    # not reaped: its number is still its own
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(errors.NotFound, match="has ended"):
        vm.recover({"a": TARGET, "gone": OTHER})
