"""crust.handoff.store: entries appear, change and disappear atomically; unknown files are kept and reported."""

import fcntl
import json
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.claims import HeldBySandbox, NotPublished
from crust.handoff.entry import IN_TURN, DirectoryReader, UnknownHandoffFile
from crust.handoff.layout import UntrustedDirectory
from crust.handoff.mount_info_models import Reserved
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import EntryDiffers, Store
from crust.host import answers
from crust.host.files import durable
from crust.host.process import processes
from tests.support.faults import syncs
from tests.support.raised import raised
from tests.support.records.records import KEY, TARGET, a_record

OTHER = volumes.TargetPath.parse("/var/lib/kubelet/pods/other/mount")


OTHER_DEVICE = volumes.BlockSource("/dev/loop8", volumes.DeviceIdentity(7, 8, 99))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/run/volumes")
    made.open()
    return made


def _paths(store: Store, target: volumes.TargetPath = TARGET) -> layout.EntryPaths:
    return store.layout.entry(target)


def _claim(store: Store, sandbox_id: str = "sandbox-1") -> claims.ClaimLock:
    lock = claims.ClaimLock.acquire(_paths(store), TARGET)
    state = claims.Claim(
        sandbox_id, "kata", claims.State.MOUNTED, "", 1, a_record().crust.published_at, live=True
    )
    claims.write(lock.paths, state)
    return lock


def test_published_record_can_be_read_only_by_root(store: Store) -> None:
    record = a_record()
    entry = store.write(record)
    assert store.read(TARGET) == entry
    assert entry.record == record
    assert not entry.live
    assert stat.S_IMODE(os.stat(store.root).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(entry.directory).st_mode) == 0o700
    modes = {
        name: stat.S_IMODE(os.stat(f"{entry.directory}/{name}").st_mode)
        for name in os.listdir(entry.directory)
    }
    assert modes == {"mountInfo.json": 0o600, "claim.lock": 0o600}


def test_open_store_is_empty_and_opening_again_changes_nothing(store: Store) -> None:
    store.open()
    assert store.read(TARGET) is None
    assert store.scan() == ()
    assert Store(f"{store.root}/not/there").scan() == ()


def test_writer_has_the_lock_that_the_contract_names(store: Store) -> None:
    """As a program without crust's code asks: struct flock by hand. flock(2) sees no such lock."""
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with (
        store.lock(),
        open(f"{store.root}/{layout.WRITER_LOCK}", "r+b") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, whole_file)
    with open(f"{store.root}/{layout.WRITER_LOCK}", "r+b") as other:
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, whole_file)


def test_same_content_again_changes_nothing(store: Store) -> None:
    first = store.write(a_record())
    inode = os.stat(_paths(store).record).st_ino
    again = store.write(a_record().replaced(generation=7))
    assert again == first
    assert os.stat(_paths(store).record).st_ino == inode


@pytest.mark.spec("H-15")
def test_other_request_for_target_is_refused_naming_published_volume(store: Store) -> None:
    store.write(a_record().replaced(request="1" * 64))
    for other in (a_record().replaced(request="2" * 64), a_record()):
        with pytest.raises(EntryDiffers, match=r"block\.csi\.crust\.dev/vol-1"):
            store.write(other)


@pytest.mark.spec("H-15")
def test_same_request_with_another_mount_replaces_the_record(store: Store) -> None:
    store.write(a_record())
    written = store.write(a_record(fs_type="xfs", readonly=True)).require()
    assert (written.mount.fs_type, written.readonly, written.crust.generation) == ("xfs", True, 2)


@pytest.mark.spec("H-15")
def test_record_of_a_live_sandbox_changes_in_size_alone(store: Store) -> None:
    store.write(a_record())
    with _claim(store):
        with pytest.raises(HeldBySandbox, match="sandbox-1"):
            store.write(a_record(source=OTHER_DEVICE))
        assert store.write(a_record(fs_type="xfs")).require().crust.generation == 1
        grown = store.write(a_record(fs_type="xfs", capacity_bytes=2 << 30)).require()
        assert grown.mount == a_record(capacity_bytes=2 << 30).mount


def test_rewrite_keeps_the_claim_and_increments_the_generation(store: Store) -> None:
    store.write(a_record())
    with _claim(store):
        read = store.read(TARGET)
        assert read is not None
        entry = store.rewrite(read, a_record(capacity_bytes=2 << 30).mount)
        assert entry.require().crust.generation == 2
        assert entry.claim is not None
        assert entry.live
        assert store.read(TARGET) == entry


@pytest.mark.spec("H-16")
def test_keys_of_a_later_version_are_kept_by_a_rewrite(store: Store) -> None:
    """An earlier proxy that grows a volume must not remove what a later one reads again after the way back."""
    store.write(a_record())
    path = Path(_paths(store).record)
    plain = json.loads(path.read_text())
    plain["later"] = plain["crust"]["later"] = {"shiny": True}
    path.write_text(json.dumps(plain))
    entry = store.read(TARGET)
    assert entry is not None
    store.rewrite(entry, replace(a_record().mount, capacity_bytes=7))
    now = json.loads(path.read_text())
    assert (now["crust"]["capacity_bytes"], now["crust"]["generation"]) == (7, 2)
    assert now["later"] == now["crust"]["later"] == {"shiny": True}
    other = a_record().replaced(replace(a_record().mount, content_generation=8))
    assert store.write(other).require().crust.generation == 3
    assert "later" not in path.read_text(), "another publish is another record"


@pytest.mark.spec("H-17")
def test_begin_unpublish_is_refused_while_a_sandbox_has_the_volume(store: Store) -> None:
    store.write(a_record())
    with (
        _claim(store, "sandbox-9"),
        pytest.raises(HeldBySandbox, match="sandbox-9 of kata") as caught,
    ):
        store.begin_removal(TARGET)
    assert caught.value.sandbox_id == "sandbox-9"
    assert store.read(TARGET) is not None


def test_removal_excludes_sandboxes_and_leaves_the_entry_unless_completed(store: Store) -> None:
    entry = store.write(a_record())
    with store.begin_removal(TARGET), pytest.raises(HeldBySandbox):
        claims.ClaimLock.acquire(_paths(store), TARGET)
    claims.ClaimLock.acquire(_paths(store), TARGET).close()
    assert store.read(TARGET) == entry


@pytest.mark.spec("H-11")
def test_entry_without_record_is_absent_and_a_publish_replaces_it(store: Store) -> None:
    store.write(a_record())
    _claim(store).close()
    os.unlink(_paths(store).record)
    assert store.read(TARGET) is None
    assert store.find_record(TARGET) is None
    assert store.scan() == ()
    assert store.write(a_record()).claim is None
    assert claims.read(store.layout.entry(TARGET)) is None
    assert os.listdir(store.root) == [TARGET.digest]


def test_publish_does_not_replace_a_claimed_entry_without_record(store: Store) -> None:
    store.write(a_record())
    os.unlink(_paths(store).record)
    with _claim(store), pytest.raises(HeldBySandbox):
        store.write(a_record())


def test_unpublish_is_durable_at_its_answer(store: Store) -> None:
    """An entry that a power cut brings back would be published again to a runtime, without its device."""
    store.write(a_record())
    with store.begin_removal(TARGET) as unpublish, syncs.recorded() as steps:
        unpublish.complete()
    assert [kind for kind, _ in steps[:2]] == ["name", "sync"]
    assert steps[1] == ("sync", store.root)


@pytest.mark.spec("H-42")
def test_files_of_runtime_are_neither_reported_nor_kept(store: Store) -> None:
    store.write(a_record())
    _claim(store).close()
    for name in ("runtime-file", "runtime-8f14e45fceea167a"):
        Path(_paths(store).directory, name).write_text("mine")
    entry = store.read(TARGET)
    assert entry is not None
    assert entry.unknown == ()
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    assert os.listdir(store.root) == []
    with pytest.raises(NotPublished):
        store.begin_removal(TARGET)


@pytest.mark.spec("H-41")
@pytest.mark.parametrize("is_newer", [True, False])
def test_unreadable_record_says_what_its_envelope_reserves(store: Store, *, is_newer: bool) -> None:
    store.write(a_record())
    path = Path(_paths(store).record)
    newer = path.read_text().replace('"schema":1', '"schema":9,"more":{}')
    path.write_text(newer if is_newer else "{")
    entry = store.read(TARGET)
    assert entry is not None
    assert entry.error is not None
    wanted = Reserved(KEY, TARGET, a_record().identity, readonly=False)
    assert entry.reserved == (wanted if is_newer else None)


def test_reservation_of_another_entry_is_not_believed(store: Store) -> None:
    """Else an entry could reserve, and let `remove_orphans` clear, a target that is not its own."""
    store.write(a_record())
    other = store.write(a_record(OTHER))
    shutil.copyfile(_paths(store).record, f"{other.directory}/{layout.RECORD}")
    read = store.read(OTHER)
    assert read is not None
    assert isinstance(read.error, UnreadableHandoffRecord)
    assert read.reserved is None


def test_recent_change_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes within one tick of the kernel's clock (10 ms at 100 Hz) leave one time of the directory."""
    targets = [volumes.TargetPath.parse(f"/var/lib/kubelet/pods/{n}/mount") for n in range(9)]
    entries = [store.write(a_record(target)) for target in targets]
    reader = DirectoryReader(store.layout)
    now_ns = time.time_ns()
    monkeypatch.setattr("crust.handoff.entry.time.time_ns", lambda: now_ns)
    for age_ns, read in ((20 * 10**6, len(targets)), (3600 * 10**9, IN_TURN)):
        for entry in entries:
            os.utime(entry.directory, ns=(0, now_ns - age_ns))
        reader.look()
        assert len(reader.look().entries) == read


@pytest.mark.spec("H-19", "H-3")
def test_unknown_names_are_reported_and_kept_by_unpublish(store: Store) -> None:
    store.write(a_record())
    unknown = Path(_paths(store).directory, "sandbox-7")
    unknown.write_text("precious")
    Path(store.root, "lost+found").mkdir()
    nobody, entry = sorted(store.scan(), key=lambda entry: entry.record is not None)
    assert isinstance(nobody.error, UnknownHandoffFile)
    assert entry.unknown == ("sandbox-7",)
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    assert store.read(TARGET) is None
    (kept,) = store.remove_orphans()
    assert Path(kept, "sandbox-7").read_text() == "precious"
    assert os.listdir(kept) == ["sandbox-7"]
    store.write(a_record())


@pytest.mark.spec("H-20")
def test_remove_orphans_removes_only_what_a_crash_left(store: Store) -> None:
    entry = store.write(a_record())
    for path in (store.layout.new_staging(TARGET.digest), store.layout.new_gone(TARGET.digest)):
        os.mkdir(path)
        Path(path, layout.RECORD).write_text("{")
        Path(path, ".mountInfo.json.tmp").write_text("")
    Path(store.root, ".somebody").mkdir()
    assert store.remove_orphans() == ()
    assert sorted(os.listdir(store.root)) == [".somebody", TARGET.digest]
    assert store.read(TARGET) == entry


def test_remove_orphans_keeps_directory_with_name_of_file(store: Store) -> None:
    store.write(a_record())
    for name in ("claim.json", ".hidden"):
        Path(_paths(store).directory, name).mkdir()
    # a claim that cannot be read cannot be known to be dead
    with pytest.raises(durable.UnreadableFile):
        store.begin_removal(TARGET)
    Path(_paths(store).directory, "claim.json").rmdir()
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    (kept,) = store.remove_orphans()
    assert os.listdir(kept) == [".hidden"]


def _replaced(store: Store, make: Callable[[str], object]) -> str:
    store.write(a_record())
    path = _paths(store).record
    os.unlink(path)
    make(path)
    return path


def _socket(path: str) -> None:
    directory = os.open(os.path.dirname(path), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def _writable(path: str) -> None:
    """The record, which others may write."""
    Path(path).write_bytes(a_record().to_bytes())
    os.chmod(path, 0o666)


@pytest.mark.spec("H-10")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: Path(path).write_bytes(b"{}"), id="not a record"),
        pytest.param(lambda path: Path(path).write_bytes(b"x" * 100_000), id="too large"),
        pytest.param(lambda path: os.symlink("/etc/passwd", path), id="symlink"),
        pytest.param(lambda path: os.symlink("nowhere", path), id="dangling symlink"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(os.mkdir, id="directory"),
        pytest.param(_socket, id="socket"),
        pytest.param(_writable, id="writable"),
    ],
)
def test_unreadable_record_is_never_absent(store: Store, make: Callable[[str], object]) -> None:
    path = _replaced(store, make)
    entry = store.read(TARGET)
    assert entry is not None
    assert isinstance(entry.error, errors.Corrupt | errors.Refused)
    with pytest.raises(type(entry.error)):
        entry.require()
    with pytest.raises(type(entry.error)):
        store.find_record(TARGET)
    assert [entry.digest for entry in store.scan()] == [TARGET.digest]
    with pytest.raises(type(entry.error)):
        store.write(a_record())
    with pytest.raises(type(entry.error)):
        store.rewrite(entry, a_record().mount)
    assert os.path.lexists(path)


@pytest.mark.parametrize("damage", ["symlink", "file", "writable"])
def test_entry_that_is_no_trusted_directory_is_kept(store: Store, damage: str) -> None:
    directory = _paths(store).directory
    if damage == "symlink":
        store.write(a_record())
        os.rename(directory, f"{store.root}/.elsewhere")
        os.symlink(f"{store.root}/.elsewhere", directory)
    elif damage == "file":
        Path(directory).write_text("")
    else:
        store.write(a_record())
        os.chmod(directory, 0o777)
    entry = store.read(TARGET)
    assert entry is not None
    assert isinstance(entry.error, UntrustedDirectory)
    with pytest.raises(UntrustedDirectory):
        store.write(a_record())
    assert os.path.lexists(directory)


def test_root_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "volumes").mkdir(mode=0o700)
    os.chmod(tmp_path / "volumes", 0o777)
    with pytest.raises(durable.UntrustedFile):
        Store(f"{tmp_path}/volumes").open()


def test_entry_with_unreadable_record_can_be_unpublished(store: Store) -> None:
    _replaced(store, lambda path: Path(path).write_bytes(b"{}"))
    with store.begin_removal(TARGET) as unpublish:
        assert isinstance(unpublish.entry.error, UnreadableHandoffRecord)
        unpublish.complete()
    assert os.listdir(store.root) == []


def test_unpublish_without_lock_file_needs_never_claimed_entry(store: Store) -> None:
    store.write(a_record())
    os.unlink(_paths(store).claim_lock)
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()
    store.write(a_record())
    _claim(store).close()
    os.unlink(_paths(store).claim_lock)
    with raised("ClaimLockMissing"):
        store.begin_removal(TARGET)


def test_unreadable_claim_is_reported_and_does_not_hide_the_record(store: Store) -> None:
    store.write(a_record())
    Path(_paths(store).claim).write_text("{}")
    entry = store.read(TARGET)
    assert entry is not None
    assert entry.record == store.find_record(TARGET) == a_record()
    assert isinstance(entry.claim_error, UnreadableHandoffRecord)


def test_scan_reads_a_thousand_entries_in_order(store: Store) -> None:
    targets = [volumes.TargetPath.parse(f"/pods/{number}/mount") for number in range(1000)]
    for target in targets:
        store.write(a_record(target))
    scanned = store.scan()
    assert [entry.digest for entry in scanned] == sorted(target.digest for target in targets)
    assert {entry.require().target for entry in scanned} == set(targets)


@pytest.mark.spec("H-17")
def test_entry_of_living_process_is_neither_removed_nor_given_device(
    store: Store,
) -> None:
    """Its keepers were killed: the lock is free, and the process may write to the device."""
    store.write(a_record())
    process = answers.seen(processes.of(os.getpid()))
    state = claims.Claim(
        "sandbox-1", "kata", claims.State.MOUNTED, "", 1, None, live=False, process=process
    )
    claims.write(_paths(store), replace(state, claimed_at=a_record().crust.published_at))
    before = claims.read(_paths(store))
    changes: tuple[Callable[[], object], ...] = (
        lambda: store.begin_removal(TARGET),
        lambda: store.write(a_record(source=OTHER_DEVICE)),
    )
    for change in changes:
        with pytest.raises(claims.HypervisorLives, match="sandbox-1"):
            change()
        assert claims.read(_paths(store)) == before
    entry = store.read(TARGET)
    assert entry is not None
    assert entry.record == a_record()


@pytest.mark.spec("H-17")
def test_unpublish_that_is_given_up_keeps_the_dead_claim(store: Store) -> None:
    """The driver has refused: the claim that its hypervisor would take again must be there."""
    store.write(a_record())
    _claim(store).close()
    before = claims.read(_paths(store))
    with store.begin_removal(TARGET):
        assert not os.path.exists(_paths(store).claim), "a reader would take it for a live one"
    assert claims.read(_paths(store)) == before
    with store.begin_removal(TARGET) as removal:
        removal.complete()
    store.write(a_record())
    assert claims.read(_paths(store)) is None


def test_removed_lock_is_not_made_again_beside_dead_claim(store: Store) -> None:
    store.write(a_record())
    _claim(store).close()
    claims.ClaimLock.acquire(_paths(store), TARGET).close()
    os.unlink(_paths(store).claim_lock)
    with raised("ClaimLockMissing"):
        store.begin_removal(TARGET)
