"""Another file has the name of an attached image: what pods write is in a file without a name."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines.protocol import ImageReplaced
from crust.core import volumes
from crust.host.block import loop
from crust.host.mounts import mount_api
from tests.support.co import encoded
from tests.support.drivers import remnants
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.records import copies, pool_layout

pytestmark = pytest.mark.root


def replaced_image(bench: Bench, volume_id: str) -> None:
    """One image from a backup, under a driver that runs."""
    image = bench.image(volume_id)
    copy = bench.root / "copy.img"
    shutil.copy2(image, copy)
    copy.rename(image)


def restored_pool(bench: Bench, volume_id: str) -> None:
    """All files of the pool from a backup, with the driver stopped: the folders are other ones, too."""
    state, backup = bench.root / "state", bench.root / "backup"
    bench.let_go()
    subprocess.run(["cp", "--archive", state, backup], check=True)
    subprocess.run(["find", state, "-mindepth", "1", "-delete"], check=True)
    subprocess.run(["cp", "--archive", f"{backup}/.", state], check=True)
    bench.restart()


Replace = Callable[[Bench, str], None]
each_way = pytest.mark.parametrize("replace", [replaced_image, restored_pool])


def devices(bench: Bench) -> list[loop.LoopDevice]:
    return list(remnants.devices(bench.root))


async def published(bench: Bench) -> tuple[str, str]:
    volume_id, target = (await bench.create()).volume_id, bench.target("pod")
    await bench.up(volume_id, target)
    return volume_id, target


@each_way
async def test_replaced_image_is_reported_and_refused_to_each_use(
    bench: Bench, replace: Replace
) -> None:
    volume_id, target = await published(bench)
    await asyncio.to_thread(replace, bench, volume_id)
    entry = (await bench.co.volumes())[volume_id]
    assert entry.status.volume_condition.abnormal
    assert "/dev/loop" in entry.status.volume_condition.message
    stats = await bench.co.stats(volume_id, target)
    assert stats.volume_condition.abnormal
    state = bench.root / "state"
    before = pool_layout.volume_record(state, volume_id).read_bytes()
    calls: list[Callable[[], Any]] = [
        lambda: bench.publish(volume_id, bench.target("second")),
        lambda: bench.stage(volume_id),
        lambda: bench.grow(volume_id, 128 * MIB),
        lambda: bench.co.expand(volume_id, target, 128 * MIB),
        lambda: bench.co.snapshot(volume_id),
        lambda: bench.co.group(volume_id),
        lambda: copies.made_of(bench, "copy", volume_id=volume_id),
        lambda: bench.co.confirms(volume_id, encoded(mount())),
        lambda: bench.delete(volume_id),
    ]
    for call in calls:
        with pytest.raises(ImageReplaced, match="losetup -d"):
            await call()
    assert bench.image(volume_id).stat().st_size == 64 * MIB
    assert pool_layout.volume_record(state, volume_id).read_bytes() == before
    [device] = devices(bench)
    await bench.unpublish(volume_id, target)
    loop.detach(device)


@each_way
async def test_device_of_replaced_image_stays_until_a_person_detaches_it(
    bench: Bench, tmp_path: Path, replace: Replace
) -> None:
    volume_id, target = await published(bench)
    await asyncio.to_thread(replace, bench, volume_id)
    Path(target, "later").write_bytes(b"after the backup")
    os.sync()
    await bench.unpublish(volume_id, target)
    for _ in range(2):
        with pytest.raises(ImageReplaced):
            await bench.unstage(volume_id)
        await bench.driver.collect_garbage()
        await asyncio.to_thread(bench.restart)
    [device] = devices(bench)
    saved = tmp_path / "saved"
    saved.mkdir()
    mount_api.mount_device(device.path, str(saved), "ext4")
    assert (saved / "later").read_bytes() == b"after the backup"
    mount_api.unmount(str(saved))
    loop.detach(device)
    assert not (await bench.co.volumes())[volume_id].status.volume_condition.abnormal
    await bench.unstage(volume_id)
    await bench.up(volume_id, target)
    assert not Path(target, "later").exists()


async def test_raw_volume_of_replaced_image_is_not_grown_or_detached(bench: Bench) -> None:
    volume_id, target = (await bench.create("a", block())).volume_id, bench.target("a")
    await bench.up(volume_id, target, block())
    replaced_image(bench, volume_id)
    await bench.unpublish(volume_id, target)
    access = bench.driver.stores.access
    for use in (access.refresh, access.detach, access.attach, access.attached):
        with pytest.raises(ImageReplaced):
            use(volumes.VolumeId(volume_id))
    [device] = devices(bench)
    loop.detach(device)
