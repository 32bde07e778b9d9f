"""The disk of a pool fails for good under pods, or another pool is in its place: pods end, and no device stays."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crust.blockdriver.engines.files.provisioning import PoolNotUsable
from crust.core import errors, volumes
from tests.support.drivers import pools, remnants
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


@contextmanager
def bench_on_own_disk(fs_type: str, root: Path) -> Iterator[Bench]:
    with pools.mounted(fs_type, root, root / "state", size=1024 * MIB):
        bench = Bench(root)
        try:
            yield bench
        finally:
            bench.let_go()
            remnants.remove(root / "pods")
            remnants.remove(root / "state", keep=str(root / "state"))


@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
async def test_failed_disk_of_the_pool_is_named(tmp_path: Path, fs_type: str) -> None:
    """No loop device is attached: of one on a failed xfs the kernel answers nothing, whoever lists them."""
    with bench_on_own_disk(fs_type, tmp_path) as bench:
        await bench.create()
        check_usable = bench.driver.stores.provisioning.check_usable
        await asyncio.to_thread(check_usable)
        pools.fail(bench.root / "state")
        with pytest.raises(PoolNotUsable):
            await asyncio.to_thread(check_usable)
        with pytest.raises(errors.CrustError, match="EIO"):
            await bench.create("another")


async def test_pod_ends_on_a_failed_disk_of_the_pool(tmp_path: Path) -> None:
    with bench_on_own_disk("ext4", tmp_path) as bench:
        volume_id, target = await bench.published()
        pools.fail(bench.root / "state")
        await bench.down(volume_id, target)
        assert remnants.devices(bench.root / "state") == []


@pytest.mark.parametrize("capability", [mount(), block()], ids=["mount", "block"])
async def test_unstage_below_another_pool_detaches_the_lost_pools_device(
    bench: Bench, capability: volumes.VolumeCapability
) -> None:
    """The kubelet unstages it, and has no other driver to call."""
    volume_id, target = await bench.published(capability=capability)
    state, lost, memory = (bench.root / name for name in ("state", "lost", "state.pool-id"))
    bench.let_go()
    remembered = memory.read_text()
    state.rename(lost)
    memory.unlink()
    state.mkdir(0o700)
    bench.restart()
    assert bench.ids.pool_id not in volume_id
    beside = await bench.staged("beside")
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    [device] = remnants.devices(bench.root)
    assert beside in device.backing
    await bench.unstage(beside)
    bench.let_go()
    state.rename(bench.root / "new")
    lost.rename(state)
    memory.write_text(remembered)
    bench.restart()
    await bench.delete(volume_id)
    assert pool_layout.volume_records(state) == set()
