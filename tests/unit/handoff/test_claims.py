"""crust.handoff.claims: the lock proves that a sandbox lives, the file names it; the layout says where both are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.handoff import claims, layout
from crust.handoff.claims import Claim, ClaimLock, HeldBySandbox, NotPublished, State
from crust.handoff.layout import Layout
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.host.files import locks
from tests.support.records.records import TARGET, a_record


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


def test_error_of_any_length_and_script_is_kept_readable(paths: layout.EntryPaths) -> None:
    with ClaimLock.acquire(paths, TARGET):
        claims.write(paths, _claim(state=State.ERROR, error="größe \n" * 2000))
        claim = claims.read(paths)
    assert claim is not None
    assert claim.error.startswith("größe \n")
    assert len(claim.error) == 2000


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


@pytest.mark.spec("H-1")
def test_entry_is_named_by_digest_of_target_path() -> None:
    entry = Layout("/r").entry(TARGET)
    assert entry.directory == f"/r/{TARGET.digest}"
    assert entry == Layout("/r").entry(TARGET.digest)
    assert entry.record == f"/r/{TARGET.digest}/mountInfo.json"
    assert entry.claim_lock == f"/r/{TARGET.digest}/claim.lock"


@pytest.mark.parametrize("key", ["", "abc", "../" + "a" * 61, "A" * 64, "a" * 63 + "/", "a" * 65])
def test_entry_refuses_a_name_that_is_not_a_digest(key: str) -> None:
    with pytest.raises(ValueError, match="not an entry's name"):
        Layout("/r").entry(key)


@pytest.mark.spec("H-2")
def test_names_for_building_and_removing_are_hidden_and_temporary() -> None:
    names = Layout("/r")
    for path in (names.new_staging(TARGET.digest), names.new_gone(TARGET.digest)):
        name = path.removeprefix("/r/")
        assert layout.is_hidden(name)
        assert layout.is_temporary(name)
    assert names.new_staging(TARGET.digest) != names.new_staging(TARGET.digest)
