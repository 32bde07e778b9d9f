"""A pool whose disk is full, hangs or has failed, and a kernel that hides processes, fire their critical alerts."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from crust.blockdriver import driver as drivers
from crust.blockdriver import serve
from crust.blockdriver.controller import class_parameters
from crust.blockdriver.engines import files
from crust.blockdriver.host import fsfreeze
from crust.blockdriver.services import calls
from crust.core.settings import OWN_DRIVER
from crust.rpc import channel
from crust.rpc.serving import worker_watch
from tests.support.co import MIB, Co
from tests.support.drivers import pools
from tests.support.prometheus import (
    fires,
    free_port,
    quick_rules,
    scraped_often,
    scraping,
    scraping_this_process,
)

pytestmark = pytest.mark.root


def fill(pool: Path) -> None:
    """As another program on the pool's disk does, to the last block."""
    with (pool / "foreign").open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    continue


@asynccontextmanager
async def driver_on_disk(root: Path) -> AsyncIterator[Co]:
    """The calls of a driver whose pool has a filesystem of its own."""
    run_dir, socket, pool = f"{root}/run", f"{root}/csi.sock", root / "state"
    with pools.mounted("ext4", root, pool, size=512 * MIB):
        built = drivers.build(
            engine=files.engine(str(pool), create=True),
            run_dir=run_dir,
            node_id="n",
            target_roots=(str(root),),
        )
        async with (
            serve.running(built, socket=socket, run_dir=run_dir),
            channel.connect(socket) as connected,
        ):
            yield Co(connected)


@pytest.mark.parametrize(
    ("fault", "alert", "reason"),
    [
        (fill, "CrustPoolFull", None),
        (fill, "CrustVolumesAbnormal", "CapacityMissing"),
        (pools.fail, "CrustVolumesAbnormal", "RecordUnreadable"),
    ],
    ids=["full", "lacks", "failed"],
)
async def test_disk_of_a_pool_fires_its_critical_alert(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], None],
    alert: str,
    reason: str | None,
) -> None:
    for period in ("MEASURE_PERIOD_S", "EXAMINE_PERIOD_S"):
        monkeypatch.setattr(drivers, period, 0.2)
    async with driver_on_disk(tmp_path) as co:
        await co.create("thin")
        await co.create("thick", parameters={class_parameters.PROVISIONING: "thick"})
        async with scraping_this_process(tmp_path, caplog, quick_rules(tmp_path)) as address:
            await asyncio.to_thread(fault, tmp_path / "state")
            labels = await fires(address, alert)
    assert (labels["severity"], labels["driver"]) == ("critical", OWN_DRIVER)
    assert labels.get("reason") == reason


async def test_filesystem_that_hangs_fires_its_critical_alert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to it wait for a thaw that does not come, as for a disk that does not answer."""
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.2)
    monkeypatch.setattr(calls, "_LONG_S", 1.0)
    async with (
        driver_on_disk(tmp_path) as co,
        scraping_this_process(tmp_path, caplog, quick_rules(tmp_path)) as address,
    ):
        frozen = fsfreeze.Freeze(str(tmp_path / "state"))
        try:
            creating = asyncio.create_task(co.create(), name="create")
            labels = await fires(address, "CrustOperationsHang")
        finally:
            frozen.thaw()
        with pytest.raises(grpc.aio.AioRpcError, match="OperationOverdue"):
            await creating
    assert (labels["severity"], labels["error"]) == ("critical", "OperationsHang")


async def test_kernel_that_hides_processes_fires_its_critical_alert(tmp_path: Path) -> None:
    """As a driver without CAP_SYS_PTRACE sees the files of no process that has it."""
    metrics, socket = f"127.0.0.1:{free_port()}", f"{tmp_path}/csi.sock"
    command = (
        *("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"),
        *(sys.executable, "-m", "crust", "driver", "--create-pool", "--no-check-propagation"),
        *(f"--socket={socket}", f"--state-dir={tmp_path}/state", f"--run-dir={tmp_path}/run"),
        *(f"--target-root={tmp_path}", "--node-id=n", f"--metrics-address={metrics}"),
    )
    staging, target = tmp_path / "staging", tmp_path / "pod" / "mount"
    for directory in (staging, target.parent):
        directory.mkdir()
    driver = await asyncio.create_subprocess_exec(*command)
    try:
        async with (
            channel.connect(socket) as connected,
            scraping(tmp_path, metrics, quick_rules(tmp_path)) as address,
        ):
            co = Co(connected, waits=True)
            volume_id = (await co.create()).volume_id
            await scraped_often(address)
            await co.stage(volume_id, str(staging))
            await co.publish(volume_id, str(target), staging=str(staging))
            await co.unpublish(volume_id, str(target))
            with pytest.raises(grpc.aio.AioRpcError, match="NotSeen"):  # a guest may have it still
                await co.publish(volume_id, str(target), defer=False, staging=str(staging))
            labels = await fires(address, "CrustHostNotSeen")
            await co.unstage(volume_id, str(staging))
    finally:
        driver.terminate()
        await driver.wait()
    assert labels["severity"] == "critical"
