"""Files as an engine: their space, their copies, and what cannot be seen of them."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import files
from crust.blockdriver.engines.files.directories import Directories, Reserve
from crust.blockdriver.engines.files.provisioning import FileProvisioning, PoolNotUsable, copy_in
from crust.blockdriver.engines.pool_access import Attachment, RecordKind
from crust.blockdriver.engines.protocol import Image
from crust.core import volumes
from crust.host.answers import NotSeen
from crust.host.process import syscalls
from tests.support.drivers.block_driver import MIB
from tests.support.faults import lies
from tests.support.faults.syncs import recorded
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.volume_directories import IDS, RECORDS, VOLUME, directories


def test_files_spare_hundredth_of_pool_and_at_least_64_mib(tmp_path: Path) -> None:
    engine = files.engine(str(tmp_path / "pool"), create=True)
    engine.home.open()
    engine.provisioning.open()
    space = engine.provisioning.space()
    assert space.spare_bytes == max((space.free_bytes + space.own_bytes) // 100, 64 * MIB)


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


SIZE = 8192
IMAGE = Image(IDS.snapshot_id("snap"), VOLUME, SIZE)


class _Attached:
    """Knows the device of every volume."""

    is_btrfs = False

    def __init__(self, device: Path) -> None:
        source = volumes.BlockSource(str(device), volumes.DeviceIdentity(7, 0, 1))
        self._attachment = Attachment(source, SIZE)

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        return (VOLUME,)

    def attached(self, _: volumes.VolumeId) -> Attachment:
        return self._attachment


def provisioning(tmp_path: Path, device: Path) -> FileProvisioning:
    """With one volume."""
    kept = directories(tmp_path)
    (tmp_path / "snapshots").mkdir()
    sets = Directories(
        tmp_path / "snapshots", RecordKind.SNAPSHOTS, IDS.is_set_id, Reserve(tmp_path / "reserve")
    )
    attached: Any = _Attached(device)
    pool = FileProvisioning(kept, sets, attached)
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
def test_no_block_is_own_while_a_snapshot_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A volume may rewrite all that it shares with it: as own bytes they would be promised to another."""
    pool = provisioning(tmp_path, tmp_path / "device")
    (tmp_path / "device").touch()
    pool_layout.image(tmp_path, VOLUME).write_bytes(b"x" * SIZE)
    with pool.taking(IMAGE.snapshot_id, [IMAGE]) as taking:
        taking.take(IMAGE)
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})
    listdir = os.listdir

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith(IMAGE.snapshot_id):
            raise OSError(code, os.strerror(code), path)
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", failing)
        for _ in range(2):
            space = pool.space()
            assert (space.own_bytes, space.snapshot_bytes) == (0, 0)
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


def test_blocks_of_an_unseen_image_may_be_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no reason to call another volume unhealthy."""
    pool, image = provisioning(tmp_path, tmp_path / "device"), pool_layout.image(tmp_path, VOLUME)
    image.write_bytes(b"x" * SIZE)
    lstat = os.lstat

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith(image.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return lstat(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", failing)
        space = pool.space()
    assert space.own_bytes == 0
    assert space.unseen_bytes >= SIZE
    assert pool.space().own_bytes >= SIZE


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


@pytest.mark.parametrize(
    ("code", "name"), [(errno.ENOSPC, "PoolFull"), (errno.EMFILE, "ProcessOutOfResources")]
)
def test_pool_is_full_only_without_space(tmp_path: Path, code: int, name: str) -> None:
    pool = provisioning(tmp_path, tmp_path / "device")
    with raised(name), pool.naming_full_pool(VOLUME), syscalls.translating("cannot write"):
        raise OSError(code, os.strerror(code))
