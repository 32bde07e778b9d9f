"""Files as an engine: directories of volumes, records and snapshots."""

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import files
from crust.blockdriver.engines.files.directories import (
    Directories,
    FileRecords,
    Reserve,
    Staged,
    VolumeDirectories,
    image_in,
)
from crust.blockdriver.engines.files.provisioning import (
    FileProvisioning,
    PoolNotUsable,
    copy_in,
)
from crust.blockdriver.engines.pool_access import PoolIds, RecordKind
from crust.blockdriver.engines.protocol import Image
from crust.core import errors, volumes
from crust.host.answers import NotSeen
from crust.host.files import durable
from crust.host.process import syscalls
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults import lies
from tests.support.faults.syncs import recorded
from tests.support.raised import raised
from tests.support.records import pool_layout, record_store_contract
from tests.support.records.stored_records import file_records
from tests.support.runtimes.fake_guests import FakeGuests


@pytest.mark.parametrize("check", record_store_contract.CHECKS)
def test_record_files_keep_to_the_contract_of_stores(
    tmp_path: Path, check: Callable[[record_store_contract.Maker, record_store_contract.Make], None]
) -> None:
    directory = tmp_path / "records"

    def make(key: str, data: bytes) -> None:
        (directory / key).mkdir()
        (directory / key / "record.json").write_bytes(data)

    check(lambda: file_records(directory), make)


def test_files_spare_hundredth_of_pool_and_at_least_64_mib(tmp_path: Path) -> None:
    engine = files.engine(str(tmp_path / "pool"), create=True)
    engine.home.open()
    engine.provisioning.open()
    space = engine.provisioning.space()
    assert space.spare_bytes == max(space.size_bytes // 100, 64 * MIB)


IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc-1")
RECORDS = {RecordKind.VOLUMES: b"a volume", RecordKind.CONTENT: b"its content"}


def directories(tmp_path: Path) -> VolumeDirectories:
    (tmp_path / "volumes").mkdir()
    return VolumeDirectories(tmp_path / "volumes", IDS.is_volume_id, Reserve(tmp_path / "reserve"))


def _fill(staged: Staged) -> None:
    Path(image_in(staged.path, VOLUME)).touch()


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


def test_start_syncs_names_and_records_of_a_killed_process(tmp_path: Path) -> None:
    engine = files.engine(str(tmp_path / "pool"), create=True)
    engine.home.open()
    volume_id = engine.home.ids.volume_id("pvc-1")
    pool_layout.directory(tmp_path / "pool", volume_id).mkdir()
    record = pool_layout.content_record(tmp_path / "pool", volume_id)
    record.touch()
    engine = files.engine(str(tmp_path / "pool"), create=True)
    with recorded() as steps:
        engine.home.open()
        engine.provisioning.open()
    synced = {path for kind, path in steps if kind == "sync"}
    pool = tmp_path / "pool"
    written = (record, pool, *(path for path in pool.rglob("*") if path.is_dir()))
    assert {str(path) for path in written} <= synced


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
    return FileRecords(made.directory, "content.json", reserve, limit_bytes=65536)


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


SIZE = 8192
IMAGE = Image(IDS.snapshot_id("snap"), VOLUME, SIZE)


class _Attached:
    """Knows the device of every volume."""

    def __init__(self, device: Path) -> None:
        self._device = str(device)

    def device_path(self, _: volumes.VolumeId) -> str:
        return self._device


def provisioning(tmp_path: Path, device: Path) -> FileProvisioning:
    """With one volume."""
    kept = directories(tmp_path)
    (tmp_path / "snapshots").mkdir()
    sets = Directories(
        tmp_path / "snapshots", RecordKind.SNAPSHOTS, IDS.is_set_id, Reserve(tmp_path / "reserve")
    )
    attached: Any = _Attached(device)
    pool = FileProvisioning(kept, sets, attached, others_at_first=int)
    with pool.making(VOLUME) as making:
        making.create(SIZE)
        making.commit(RECORDS)
    return pool


def take(pool: FileProvisioning) -> None:
    with pool.taking(IMAGE.snapshot_id, [IMAGE]) as taking:
        taking.take(IMAGE)


def moved_on(pool: FileProvisioning) -> None:
    with pool.taking(IMAGE.snapshot_id, [IMAGE]) as taking:
        copy = copy_in(taking.staged.path, IMAGE.snapshot_id)
        Path(copy).write_bytes(b"x" * SIZE)
        taking.moved_on(IMAGE)


def clone(pool: FileProvisioning) -> None:
    with pool.making(IDS.volume_id("copy")) as making:
        making.clone(VOLUME, source_bytes=SIZE, size_bytes=SIZE)


@pytest.mark.parametrize("call", [take, moved_on, clone])
def test_device_is_written_back_before_file_is_copied_or_compared(
    tmp_path: Path, call: Callable[[FileProvisioning], None]
) -> None:
    device = tmp_path / "device"
    device.touch()
    pool = provisioning(tmp_path, device)
    assert pool.copies_at_once() in (True, False)  # tried before the calls are recorded
    with recorded() as steps:
        call(pool)
    synced = [path for kind, path in steps if kind == "sync"]
    assert synced[0] == str(device)


@pytest.mark.parametrize("code", lies.ERRNOS)
def test_capacity_is_refused_until_blocks_of_snapshots_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its volume may rewrite all of them: as no bytes they would be promised to another."""
    pool = provisioning(tmp_path, tmp_path / "device")
    (tmp_path / "device").touch()
    pool_layout.image(tmp_path, VOLUME).write_bytes(b"x" * SIZE)
    with pool.taking(IMAGE.snapshot_id, [IMAGE]) as taking:
        taking.take(IMAGE)
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith(IMAGE.snapshot_id):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing)
        for _ in range(2):
            with pytest.raises(NotSeen, match=IMAGE.snapshot_id):
                pool.space()
    assert pool.space().snapshot_bytes >= SIZE
    pool.remove_set(IMAGE.snapshot_id, [IMAGE])
    assert pool.space().snapshot_bytes == 0


def test_snapshot_removed_before_its_blocks_were_seen_has_none(tmp_path: Path) -> None:
    pool = provisioning(tmp_path, tmp_path / "device")
    with pool.taking(IMAGE.snapshot_id, []) as taking:
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})
    shutil.rmtree(tmp_path / "snapshots" / IMAGE.snapshot_id)
    assert pool.space().snapshot_bytes == 0


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EMFILE])
def test_loop_control_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """By an open, which a unit's DevicePolicy refuses too; access(2) does not see that."""
    pool = provisioning(tmp_path, tmp_path / "device")
    real = os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        if path == "/dev/loop-control":
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(PoolNotUsable, match=os.strerror(code)):
        pool.check_usable()


@pytest.mark.parametrize("code", lies.ERRNOS)
def test_size_of_image_that_cannot_be_seen_is_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A volume without a readable record has its image's size reserved."""
    pool, image = provisioning(tmp_path, tmp_path / "device"), pool_layout.image(tmp_path, VOLUME)
    assert pool.image_bytes(VOLUME) == SIZE
    lstat = os.lstat

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith(image.name):
            raise OSError(code, os.strerror(code), path)
        return lstat(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", failing)
        with pytest.raises(NotSeen, match=image.name):
            pool.image_bytes(VOLUME)
    image.unlink()
    assert pool.image_bytes(VOLUME) == 0
    image.mkdir()
    assert pool.image_bytes(VOLUME) == 0


# An engine whose images only hypervisors open: what needs no device of the host.


@pytest.fixture
def runtime_guests() -> FakeGuests:
    return FakeGuests()


@pytest.fixture
def driver(tmp_path: Path, runtime_guests: FakeGuests) -> Driver:
    backend = MemoryBackend(has_devices=False)
    return driver_state.opened(tmp_path, backend=backend, runtime_guests=runtime_guests)


async def create(driver: Driver, name: str) -> volumes.VolumeId:
    return (await driver.controller.provisioner.create(driver_state.create(name))).volume_id


@pytest.fixture
async def group(driver: Driver) -> list[volumes.VolumeId]:
    """Two volumes that other nodes use."""
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.is_used_elsewhere = True
    return sorted([await create(driver, "one"), await create(driver, "two")])


async def test_gc_detaches_an_image_that_was_never_staged(driver: Driver) -> None:
    one = await create(driver, "one")
    driver.stores.access.attach(one)
    await driver.collect_garbage()
    assert driver.stores.access.attached(one) is None


async def test_snapshot_freezes_a_guest_that_opens_the_image(
    driver: Driver, runtime_guests: FakeGuests, tmp_path: Path
) -> None:
    one, target = await create(driver, "one"), str(tmp_path / "target")
    driver.stores.access.attach(one)
    guest = runtime_guests.add(target)
    driver.stores.node_state.note_published(driver_state.published(one, target))
    await driver.controller.snapshots.create("snap", one)
    assert [verb for verb, _ in runtime_guests.asked] == ["freeze", "thaw"]
    assert not guest.frozen


async def test_group_used_elsewhere_is_copied_until_nothing_is_written(
    driver: Driver, group: list[volumes.VolumeId]
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.written = [{group[0]}, {group[0]}]
    taken = await driver.controller.snapshots.create_group("group", group)
    assert backend.taken == [*group, *group, *group]
    assert backend.snapshot_ids() == {snapshot.snapshot_id for snapshot in taken.snapshots}


async def test_group_that_other_nodes_write_all_the_time_is_refused(
    driver: Driver, group: list[volumes.VolumeId]
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.written = [set(group)] * 8
    with raised("GroupNeverIdle", match=group[0]):
        await driver.controller.snapshots.create_group("group", group)
    assert backend.snapshot_ids() == frozenset()


# A start finds files that nobody can remove, and directories that nobody can list.


OTHER_BOOT = "11111111-2222-3333-4444-555555555555"
DIRECTORIES = (*(f"state/{folder}" for folder in pool_layout.FOLDERS), "run/freezes")


async def test_start_leaves_crash_remains_that_cannot_be_removed(tmp_path: Path) -> None:
    state = driver_state.opened(tmp_path)
    made = await state.controller.provisioner.create(driver_state.create())
    run = tmp_path / "run"
    for directory in (run / syscalls.boot_id(), *(tmp_path / folder for folder in DIRECTORIES)):
        (directory / ".name.0123.crust-tmp" / "in it").mkdir(parents=True)
    (run / OTHER_BOOT / "directory" / "in it").mkdir(parents=True)
    state.stores.pool.let_go()
    again = driver_state.opened(tmp_path)
    assert again.stores.volume_records.ids() == (made.volume_id,)
    assert (run / OTHER_BOOT / "directory").is_dir()


@pytest.mark.parametrize("name", pool_layout.FOLDERS)
async def test_start_with_directory_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    state = driver_state.opened(tmp_path)
    listed = (tmp_path / "state" / name).stat()
    real, looks = os.listdir, 0

    def failing(path: str) -> list[str]:
        nonlocal looks
        if os.path.samestat(os.stat(path), listed):
            looks += 1
            if looks > 1:  # the first look is for temporary files
                raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(errors.RuntimeFailed, match="cannot list"):
        state.open()
    assert looks == 2
