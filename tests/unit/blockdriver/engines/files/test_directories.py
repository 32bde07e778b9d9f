"""The directories of volumes, and the records in them."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines.files.directories import FileRecords, Reserve, Staged
from crust.core import errors
from crust.host.files import durable
from tests.support.faults.syncs import recorded
from tests.support.raised import raised
from tests.support.records import pool_layout, record_store_contract
from tests.support.records.stored_records import file_records
from tests.support.records.volume_directories import RECORDS, VOLUME, directories


@pytest.mark.parametrize("check", record_store_contract.CHECKS)
def test_record_files_keep_to_the_contract_of_stores(
    tmp_path: Path, check: Callable[[record_store_contract.Maker, record_store_contract.Make], None]
) -> None:
    directory = tmp_path / "records"

    def make(key: str, data: bytes) -> None:
        (directory / key).mkdir()
        (directory / key / "record.json").write_bytes(data)

    check(lambda: file_records(directory), make)


def _fill(staged: Staged) -> None:
    Path(staged.path / f"{VOLUME}.img").touch()


def test_volume_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        _fill(staged)
        assert (made.ids(), made.unsettled()) == (frozenset(), (VOLUME,))
    assert pool_layout.files(tmp_path) == set()
    with made.making(VOLUME) as staged:
        _fill(staged)
        staged.commit(RECORDS)
    assert pool_layout.files(tmp_path) == pool_layout.files_of(tmp_path, [VOLUME])


def test_volume_whose_name_may_not_be_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directories(tmp_path)
    _fail_syncs_of(tmp_path / "volumes", monkeypatch)

    def make() -> None:
        with made.making(VOLUME) as staged:
            _fill(staged)
            staged.commit(RECORDS)

    with pytest.raises(errors.CrustError):
        make()
    assert made.ids() == frozenset(), "a repeated create would answer OK for it"


@pytest.mark.parametrize("is_committed", [False, True])
def test_volume_put_back_during_a_create_of_its_name_stays(
    tmp_path: Path, *, is_committed: bool
) -> None:
    """An operator restores a volume while a long copy runs."""
    made = directories(tmp_path)
    restored = pool_layout.directory(tmp_path, VOLUME)

    def make() -> None:
        with made.making(VOLUME) as staged:
            _fill(staged)
            restored.mkdir()
            pool_layout.volume_record(tmp_path, VOLUME).write_bytes(b"restored")
            pool_layout.image(tmp_path, VOLUME).write_bytes(b"data")
            if not is_committed:
                raise errors.PeerUnavailable("the copy fails")
            staged.commit(RECORDS)

    with pytest.raises(durable.PathAlreadyExists if is_committed else errors.PeerUnavailable):
        make()
    assert pool_layout.image(tmp_path, VOLUME).read_bytes() == b"data"
    assert (made.ids(), made.unsettled()) == (frozenset({VOLUME}), ())


def test_removal_failed_at_its_sync_is_synced_by_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        _fill(staged)
        staged.commit(RECORDS)
    with monkeypatch.context() as patch:
        _fail_syncs_of(tmp_path / "volumes", patch)
        for _ in range(2):
            with pytest.raises(errors.CrustError):
                made.remove(VOLUME)
    with recorded() as steps:
        made.settle(VOLUME)
        made.remove(VOLUME)
    synced = [path for kind, path in steps if kind == "sync"]
    assert synced == [str(tmp_path / "volumes")] * 2
    assert made.ids() == frozenset()


def test_record_of_a_sector_is_replaced_with_one_wait(tmp_path: Path) -> None:
    store, record = _stored(tmp_path), pool_layout.content_record(tmp_path, VOLUME)
    inode = record.stat().st_ino
    with recorded() as steps:
        store.save(VOLUME, b"another", previous=b"its content")
    assert steps == [("sync", str(record))]
    assert (store.load(VOLUME), record.stat().st_ino) == (b"another", inode)


def test_record_that_is_not_a_sector_is_renamed(tmp_path: Path) -> None:
    store, record = _stored(tmp_path), pool_layout.content_record(tmp_path, VOLUME)
    os.link(record, tmp_path / "backup")
    content = b"its content"
    for data in (b"linked", b"large" * 200, b"small again"):
        with recorded() as steps:
            store.save(VOLUME, data, previous=content)
        assert [kind for kind, _ in steps] == ["sync", "name", "sync"]
        content = data
        assert store.load(VOLUME) == content
    assert (tmp_path / "backup").read_bytes().rstrip() == b"its content"


def test_record_is_read_and_written_in_place_under_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = _stored(tmp_path), list[bool]()

    def is_held(lock: Any) -> bool:
        if is_free := lock.acquire(blocking=False):
            lock.release()
        return not is_free

    def note_lock(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as other:
                held.append(any(other.map(is_held, store._locks)))
            return real(*args, **kwargs)

        return called

    monkeypatch.setattr(os, "pwrite", note_lock(os.pwrite))
    monkeypatch.setattr(durable, "content", note_lock(durable.content))
    store.save(VOLUME, b"another", previous=b"its content")
    assert held == [True, True]


def _stored(tmp_path: Path) -> FileRecords:
    """The content records of a pool with one volume."""
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        staged.commit(RECORDS)
    reserve = Reserve(tmp_path / "reserve")
    return FileRecords(made.directory, "content.json", reserve, 65536)


def _fail_syncs_of(directory: Path, patch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(directory):
            raise OSError(errno.EIO, "the disk fails")
        sync(fd)

    patch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("left", [(), ("content.json",), ("content.json", f"{VOLUME}.img")])
def test_directory_without_a_volume_record_is_neither_taken_nor_removed(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    made = directories(tmp_path)
    directory = pool_layout.directory(tmp_path, VOLUME)
    directory.mkdir()
    for name in left:
        (directory / name).touch()
    with raised("OrphanImage"), made.making(VOLUME):
        pass
    made.remove(VOLUME)
    made.open()
    assert made.ids() == {VOLUME}
    assert {path.name for path in directory.iterdir()} == set(left)


def test_removal_that_freed_no_space_is_finished_by_settlement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        staged.commit(RECORDS)

    def failing(_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        made.remove(VOLUME)
    assert "stays for now" in caplog.text
    assert (made.ids(), made.unsettled()) == (frozenset(), (VOLUME,))
    made.settle(VOLUME)
    assert pool_layout.files(tmp_path) == set()
