"""crust.handoff.claims: the lock proves that a sandbox lives, the file names it."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.claims import (
    Claim,
    ClaimLock,
    HeldBySandbox,
    HypervisorLives,
    NotPublished,
    State,
)
from crust.handoff.layout import UntrustedDirectory
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.host import answers
from crust.host.answers import NotSeen
from crust.host.files import locks
from crust.host.process import processes
from crust.host.process.processes import Process
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record

OTHER = volumes.TargetPath.parse("/var/lib/kubelet/pods/other/mount")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    made.write(a_record())
    return made


@pytest.fixture
def paths(store: Store) -> layout.EntryPaths:
    return store.layout.entry(TARGET)


def _claim(sandbox_id: str = "sandbox-1", state: State = State.CLAIMED, error: str = "") -> Claim:
    return Claim(sandbox_id, "kata", state, error, 4711, a_record().crust.published_at, live=True)


def test_claim_is_live_while_its_lock_is_held(paths: layout.EntryPaths) -> None:
    assert claims.read(paths) is None
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, _claim())
        assert claims.read(paths) == _claim()
    dead = claims.read(paths)
    assert dead is not None
    assert not dead.live
    assert dead.sandbox_id == "sandbox-1"


def test_held_lock_without_claim_file_is_a_live_claim(paths: layout.EntryPaths) -> None:
    with ClaimLock.acquire(paths, TARGET):
        claim = claims.read(paths)
        assert claim is not None
        assert (claim.live, claim.sandbox_id) == (True, "")
        claims.write(paths, _claim("dead"))
    with ClaimLock.acquire(paths, TARGET):
        claim = claims.read(paths)
        assert claim is not None
        assert (claim.live, claim.sandbox_id) == (True, ""), "not the dead claim's name"
        with pytest.raises(HeldBySandbox, match="is claiming it, or it is being unpublished"):
            ClaimLock.acquire(paths, TARGET)


@pytest.fixture
def process() -> Iterator[Process]:
    """A hypervisor's process that runs."""
    with subprocess.Popen(["sleep", "inf"]) as child:
        process = answers.seen(processes.of(child.pid))
        assert process is not None
        yield process
        child.kill()


def test_stopped_machine_of_a_held_volume_is_named(
    paths: layout.EntryPaths, process: Process
) -> None:
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, replace(_claim(), process=process))
        with raised("HeldBySandbox", match="sandbox-1 of kata has it.*; stop that sandbox first"):
            ClaimLock.acquire(paths, TARGET)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with raised("HeldBySandbox", match="virtual machine is stopped; let the machine go on"):
            ClaimLock.acquire(paths, TARGET)


def _ended() -> Process:
    with subprocess.Popen(["true"]) as child:
        process = answers.seen(processes.of(child.pid))
    return process or Process(child.pid, 1)


def _left_by(paths: layout.EntryPaths, process: Process | None) -> Claim:
    """The dead claim of a sandbox whose keepers were killed."""
    with ClaimLock.acquire(paths, TARGET) as lock:
        lock.settle()
        claims.write(paths, replace(_claim("dead"), process=process))
    dead = claims.read(paths)
    assert dead is not None
    return dead


@pytest.mark.spec("H-24")
def test_process_of_the_hypervisor_is_written_and_read(
    paths: layout.EntryPaths, process: Process
) -> None:
    assert _left_by(paths, process).process == process
    plain = json.loads(Path(paths.claim).read_text())
    assert plain["process"] == {"pid": process.pid, "started": process.started}
    assert _left_by(paths, None).process is None
    assert "process" not in json.loads(Path(paths.claim).read_text())


@pytest.mark.spec("H-22")
def test_dead_claim_of_living_process_refuses_and_stays(
    paths: layout.EntryPaths, process: Process
) -> None:
    dead = _left_by(paths, process)
    with ClaimLock.acquire(paths, TARGET) as lock:
        with pytest.raises(HypervisorLives, match=f"process {process.pid} of sandbox dead of kata"):
            lock.check_ended(TARGET)
        lock.check_ended(TARGET, but=process)
        assert lock.dead() == dead
    assert claims.read(paths) == dead
    assert sorted(os.listdir(paths.directory)) == ["claim.json", "claim.lock", "mountInfo.json"]


@pytest.mark.spec("H-22")
@pytest.mark.parametrize("is_named", [True, False])
def test_dead_claim_of_ended_process_goes_when_settled(
    paths: layout.EntryPaths, *, is_named: bool
) -> None:
    dead = _left_by(paths, _ended() if is_named else None)
    with ClaimLock.acquire(paths, TARGET) as lock:
        lock.check_ended(TARGET)
    assert claims.read(paths) == dead, "a release without the answers puts it back"
    with ClaimLock.acquire(paths, TARGET) as lock:
        lock.check_ended(TARGET)
        lock.settle()
    assert claims.read(paths) is None


@pytest.mark.spec("H-22")
def test_killed_claimant_leaves_dead_claim_to_readers_and_next(
    paths: layout.EntryPaths, process: Process
) -> None:
    dead = _left_by(paths, process)
    ClaimLock.acquire(paths, TARGET).close()  # as its end does
    assert not os.path.exists(paths.claim)
    assert claims.read(paths) == dead
    with ClaimLock.acquire(paths, TARGET) as lock:
        assert lock.dead() == dead
    assert os.path.exists(paths.claim)


def test_process_that_is_not_seen_refuses(
    paths: layout.EntryPaths, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = _left_by(paths, process)

    def refused(_pid: int) -> int:
        raise OSError(errno.EPERM, "as a seccomp filter refuses")

    monkeypatch.setattr("os.pidfd_open", refused)
    with ClaimLock.acquire(paths, TARGET) as lock, pytest.raises(NotSeen, match=f"{process.pid}"):
        lock.check_ended(TARGET)
    assert claims.read(paths) == dead


def test_dead_claim_that_cannot_be_read_refuses_and_stays(paths: layout.EntryPaths) -> None:
    Path(paths.claim).write_text("{}")
    with ClaimLock.acquire(paths, TARGET) as lock, pytest.raises(UnreadableHandoffRecord):
        lock.check_ended(TARGET)
    assert Path(paths.claim).read_text() == "{}"


@pytest.mark.spec("H-4")
def test_entry_behind_link_is_not_locked_and_keeps_claim(
    store: Store, paths: layout.EntryPaths
) -> None:
    """Otherwise the lock would be another entry's, and the claim that goes as well."""
    dead = _left_by(paths, None)
    other = store.layout.entry(OTHER)
    os.symlink(paths.directory, other.directory)
    for acquire in (
        lambda: ClaimLock.acquire(other, OTHER),
        lambda: store.begin_removal(OTHER),
    ):
        with pytest.raises(UntrustedDirectory):
            acquire()
    assert claims.read(paths) == dead


@pytest.mark.spec("H-4")
def test_root_that_others_can_write_to_has_no_lock(store: Store, paths: layout.EntryPaths) -> None:
    """Otherwise they could rename another entry into its place."""
    dead = _left_by(paths, None)
    os.chmod(store.root, 0o770)
    with pytest.raises(UntrustedDirectory, match=store.root):
        ClaimLock.acquire(paths, TARGET)
    os.chmod(store.root, 0o700)
    assert claims.read(paths) == dead


def test_error_of_any_length_and_script_is_one_line(paths: layout.EntryPaths) -> None:
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, _claim(state=State.ERROR, error="größe \n\x1b[2J\x9b" * 2000))
        claim = claims.read(paths)
    assert claim is not None
    assert claim.error.startswith(r"größe \n\x1b[2J\x9bgröße")
    assert claim.error.isprintable()
    assert len(json.loads(Path(paths.claim).read_bytes())["error"]) == 2000


def test_sandbox_id_is_escaped_in_the_error_about_its_volume(paths: layout.EntryPaths) -> None:
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, _claim(sandbox_id="box\u202eforged"))
        with pytest.raises(HeldBySandbox, match=r"sandbox box\\u202eforged of"):
            ClaimLock.acquire(paths, TARGET)


@pytest.mark.spec("H-24")
def test_claim_with_control_character_is_neither_written_nor_read(
    paths: layout.EntryPaths,
) -> None:
    odd = "box\x1b[31m\nforged"
    with pytest.raises(errors.InvalidRequest, match="sandbox_id"):
        claims.write(paths, _claim(sandbox_id=odd))
    assert not os.path.exists(paths.claim)
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, _claim(sandbox_id="box"))
        content = {**json.loads(Path(paths.claim).read_bytes()), "sandbox_id": odd}
        Path(paths.claim).write_text(json.dumps(content))
        with pytest.raises(UnreadableHandoffRecord):
            claims.read(paths)
        with pytest.raises(HeldBySandbox) as held:
            ClaimLock.acquire(paths, TARGET)
    assert held.value.sandbox_id == ""


def test_claim_without_a_sandbox_is_not_written(paths: layout.EntryPaths) -> None:
    with pytest.raises(errors.InvalidRequest, match="sandbox_id"):
        claims.write(paths, _claim(""))
    assert not os.path.exists(paths.claim)


@pytest.mark.spec("H-26")
def test_is_held_does_not_take_the_lock(
    paths: layout.EntryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "try_lock", lambda _fd: pytest.fail("a reader took the lock"))
    assert not claims.is_held(paths)


def test_other_children_of_the_claimant_do_not_keep_the_lock(paths: layout.EntryPaths) -> None:
    lock = ClaimLock.acquire(paths, TARGET)
    program = "import sys; print('exec is over', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # a parent may go on before exec has closed the child's descriptors
        lock.close()
        assert not claims.is_held(paths)
        child.kill()


def test_released_lock_is_free_though_a_child_has_a_copy(paths: layout.EntryPaths) -> None:
    with ClaimLock.acquire(paths, TARGET):
        end_read, end_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end_write)
            os.read(end_read, 1)
            os._exit(0)
    held = claims.is_held(paths)
    os.close(end_write)
    os.close(end_read)
    os.waitpid(child, 0)
    assert not held


@pytest.mark.spec("H-22")
@pytest.mark.parametrize("is_published_again", [True, False])
def test_acquire_of_an_entry_replaced_meanwhile_starts_again(
    store: Store,
    paths: layout.EntryPaths,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_published_again: bool,
) -> None:
    real = locks.try_lock

    def unpublished_meanwhile(fd: int) -> bool:
        monkeypatch.setattr(locks, "try_lock", real)
        with store.begin_removal(TARGET) as unpublish:
            unpublish.complete()
        if is_published_again:
            store.write(a_record())
        return real(fd)

    monkeypatch.setattr(locks, "try_lock", unpublished_meanwhile)
    if is_published_again:
        with ClaimLock.acquire(paths, TARGET) as lock:
            assert os.path.samestat(os.fstat(lock.fd), os.stat(paths.claim_lock))
        return
    with pytest.raises(NotPublished):
        ClaimLock.acquire(paths, TARGET)
    assert os.listdir(store.root) == []


@pytest.mark.spec("H-21")
@pytest.mark.parametrize("damage", ["symlink", "pipe", "directory", "second name", "writable"])
def test_lock_file_of_somebody_else_is_refused(paths: layout.EntryPaths, damage: str) -> None:
    lock = paths.claim_lock
    if damage == "second name":
        os.link(lock, f"{paths.directory}/.other")
    elif damage == "writable":
        os.chmod(lock, 0o666)
    else:
        os.unlink(lock)
        make = {"symlink": lambda: os.symlink(paths.record, lock), "pipe": lambda: os.mkfifo(lock)}
        make.get(damage, lambda: os.mkdir(lock))()
    # a directory cannot be opened for writing: EISDIR
    with pytest.raises((errors.Refused, errors.Conflict)):
        ClaimLock.acquire(paths, TARGET)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema":2}', '{"schema":1,"sandbox_id":"a","handler":"k","state":"gone"}']
)
def test_invalid_claim_file_is_an_error_and_not_absent(paths: layout.EntryPaths, text: str) -> None:
    Path(paths.claim).write_text(text)
    with pytest.raises(UnreadableHandoffRecord):
        claims.read(paths)


def test_removing_a_claim_is_idempotent(store: Store, paths: layout.EntryPaths) -> None:
    claims.write(paths, _claim())
    claims.remove(paths)
    claims.remove(paths)
    assert claims.read(paths) is None
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    claims.remove(paths)
