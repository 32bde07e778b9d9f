"""After the driver was killed during mkfs: the program may run on, and the record may be older than the volume.

A volume is not staged until the program has ended. In the tests it is stopped, as a disk that hangs would stop it,
before it has opened the device: the next driver can detect it only by the lock that it inherited.
"""

import asyncio
import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.records import Records
from crust.core import volumes
from crust.host.block import loop
from crust.host.filesystems import superblocks
from crust.host.process import commands
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.faults.syncs import recorded
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = pytest.mark.root

UUID = "11111111-0000-4000-8000-000000000000"
_SIZES = {"ext4": 64 * MIB, "xfs": 304 * MIB, "btrfs": 256 * MIB}


@pytest.fixture
def stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program stop itself, by SIGSTOP, before it does anything but say its version."""
    directory = tmp_path / "bin"
    directory.mkdir()
    path = commands._ENVIRONMENT["PATH"]

    def stop(program: str) -> None:
        script = directory / program
        script.write_text(
            f'#!/bin/sh\nPATH={path}\n[ "$1" = -V ] || kill -STOP $$\nexec {program} "$@"\n'
        )
        script.chmod(0o700)
        monkeypatch.setitem(commands._ENVIRONMENT, "PATH", f"{directory}:{path}")

    return stop


def _driver_killed_in(stage: Callable[[], None]) -> int:
    """Run `stage` in a process that is killed as soon as its program has stopped; returns the stopped process."""
    driver = os.fork()
    if not driver:
        gc.freeze()  # as `crashes` does
        with suppress(BaseException):
            stage()
        os._exit(1)
    program = _stopped_below(driver)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    return program


def _stopped_below(driver: int) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and _fields(name)[0] == "T" and driver in _ancestors(name):
                    return int(name)
    raise AssertionError("no program was started and stopped")


def _ancestors(pid: str) -> Iterator[int]:
    while pid != "0":
        pid = _fields(pid)[1]
        yield int(pid)


def _fields(pid: str) -> list[str]:
    return Path("/proc", pid, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


@pytest.mark.parametrize("fs_type", list(_SIZES))
def test_stage_during_mkfs_of_killed_driver_is_refused(
    bench: Bench, stopping: Callable[[str], None], reap: Callable[[], None], fs_type: str
) -> None:
    capability = mount(fs_type)
    volume = asyncio.run(bench.create("v", capability, size=_SIZES[fs_type]))
    image = str(bench.image(volume.volume_id))
    stopping(f"mkfs.{fs_type}")
    mkfs = _driver_killed_in(lambda: asyncio.run(bench.stage(volume.volume_id, capability)))
    bench.restart()

    for wanted in (capability, block()):
        with raised("VolumeInUseByTool"):
            asyncio.run(bench.stage(volume.volume_id, wanted))
    asyncio.run(bench.driver.collect_garbage())
    assert len(loop.find(image)) == 1, (
        "the device was detached, and its name may be another volume's now"
    )

    os.kill(mkfs, signal.SIGCONT)
    reap()
    commands._ENVIRONMENT["PATH"] = commands._ENVIRONMENT["PATH"].partition(":")[2]
    asyncio.run(bench.up(volume.volume_id, bench.target("v"), capability))
    asyncio.run(bench.down(volume.volume_id, bench.target("v")))


def test_stage_during_e2fsck_of_killed_driver_is_refused(
    bench: Bench, stopping: Callable[[str], None], reap: Callable[..., None]
) -> None:
    volume_id = asyncio.run(bench.create("v")).volume_id
    asyncio.run(bench.stage(volume_id))
    asyncio.run(bench.unstage(volume_id))
    image = str(bench.image(volume_id))
    made = superblocks.read(image, "ext4").uuid
    unclean = ["debugfs", "-w", "-R", "set_super_value state 0", image]
    subprocess.run(unclean, check=True, capture_output=True)
    stopping("prlimit")  # which confines e2fsck
    _driver_killed_in(lambda: asyncio.run(bench.stage(volume_id)))
    bench.restart()
    commands._ENVIRONMENT["PATH"] = commands._ENVIRONMENT["PATH"].partition(":")[2]
    with raised("VolumeInUseByTool"):
        asyncio.run(bench.stage(volume_id))
    reap(kill=True)
    asyncio.run(bench.stage(volume_id))
    asyncio.run(bench.unstage(volume_id))
    assert superblocks.read(image, "ext4").uuid == made


def test_stage_of_another_volume_while_a_tool_runs_succeeds(
    bench: Bench, stopping: Callable[[str], None], reap: Callable[..., None]
) -> None:
    first = asyncio.run(bench.create("first"))
    second = asyncio.run(bench.create("second", mount("xfs"), size=_SIZES["xfs"]))
    stopping("mkfs.ext4")
    _driver_killed_in(lambda: asyncio.run(bench.stage(first.volume_id)))
    bench.restart()
    asyncio.run(bench.stage(second.volume_id, mount("xfs")))
    asyncio.run(bench.unstage(second.volume_id))
    reap(kill=True)


@pytest.mark.parametrize("fs_type", list(_SIZES))
@pytest.mark.parametrize("planned", ["as made", "another"])
def test_stage_with_record_of_interrupted_mkfs_never_clears_used_volume(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fs_type: str, planned: str
) -> None:
    """A backup of the records was taken while the volume was made, and restored when it was full of data."""
    capability, records = mount(fs_type), bench.driver.stores.content_records
    backups: list[ContentRecord] = []

    async def lifecycle() -> None:
        volume = await bench.create("v", capability, size=_SIZES[fs_type])
        await bench.up(volume.volume_id, bench.target("v"), capability)
        Path(bench.target("v"), "precious").write_bytes(b"every byte")
        await down(volume.volume_id)

    async def down(volume_id: str) -> None:
        await bench.down(volume_id, bench.target("v"))

    def saved(self: Any, record: Any) -> Any:
        written = save(self, record)
        if isinstance(written, ContentRecord):
            backups.append(written)
        return written

    save = Records.save
    with monkeypatch.context() as patched:
        patched.setattr(Records, "save", saved)
        asyncio.run(lifecycle())
    old = next(backup for backup in backups if backup.state == "formatting")
    if planned == "another":
        old = old.replaced(planned_uuid=UUID)
    path = pool_layout.content_record(bench.root / "state", old.volume_id)
    path.write_bytes(old.encode())

    if planned == "another":
        for wanted in (capability, block()):
            with raised("ContentInDoubt"):
                asyncio.run(bench.stage(old.volume_id, wanted))
        now = records.load(volumes.VolumeId(old.volume_id))
        records.save(now.replaced(state="formatted", planned_uuid=""))
        bench.driver.stores.access.detach(volumes.VolumeId(old.volume_id))
    asyncio.run(bench.up(old.volume_id, bench.target("v"), capability))
    assert Path(bench.target("v"), "precious").read_bytes() == b"every byte"
    asyncio.run(down(old.volume_id))


def _noted_as_begun(bench: Bench) -> tuple[volumes.VolumeId, Path]:
    """A volume whose mkfs is on record as interrupted, and its record."""
    volume_id = volumes.VolumeId(asyncio.run(bench.create("v")).volume_id)
    path = pool_layout.content_record(bench.root / "state", volume_id)
    known = ContentRecord.parse(path.read_bytes(), volume_id, str)
    path.write_bytes(known.replaced(state="formatting", fs_type="ext4", planned_uuid=UUID).encode())
    return volume_id, path


def test_raw_stage_with_record_of_interrupted_mkfs_keeps_complete_filesystem(
    bench: Bench,
) -> None:
    volume_id, _ = _noted_as_begun(bench)
    image = str(bench.image(volume_id))
    subprocess.run(["mkfs.ext4", "-q", "-U", UUID, image], check=True)
    asyncio.run(bench.stage(volume_id, block()))
    assert superblocks.read(image, "ext4").uuid == UUID
    asyncio.run(bench.unstage(volume_id))


def test_filesystem_of_mkfs_that_outlived_driver_is_synced_before_record(
    bench: Bench,
) -> None:
    volume_id, path = _noted_as_begun(bench)
    device = bench.driver.stores.access.attach(volume_id).host_device.path
    subprocess.run(["mkfs.ext4", "-q", "-U", UUID, device], check=True)
    with recorded() as steps:
        asyncio.run(bench.stage(volume_id))
    assert steps.index(("sync", device)) < steps.index(("name", str(path)))
    asyncio.run(bench.unstage(volume_id))
