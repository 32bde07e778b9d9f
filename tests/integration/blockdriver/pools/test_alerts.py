"""A pool whose disk is full, or has failed, fires its critical alert in a real Prometheus."""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from crust.blockdriver import driver as drivers
from crust.blockdriver import serve
from crust.blockdriver.controller import class_parameters
from crust.blockdriver.engines import files
from crust.cli.programs import monitoring
from crust.core.settings import OWN_DRIVER
from crust.rpc import channel
from tests.integration.chain.test_prometheus import RULES, fires, scraping
from tests.support.co import MIB, Co
from tests.support.drivers import pools

pytestmark = pytest.mark.root


def fill(pool: Path) -> None:
    """As another program on the pool's disk does, to the last block."""
    with (pool / "foreign").open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    continue


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
    """The times of the rules are promtool's to test: minutes are a second here."""
    caplog.set_level(logging.INFO)
    for period in ("MEASURE_PERIOD_S", "EXAMINE_PERIOD_S"):
        monkeypatch.setattr(drivers, period, 0.2)
    rules, pool = tmp_path / "rules.yaml", tmp_path / "state"
    rules.write_text(re.sub(r"for: \d+m", "for: 1s", RULES.read_text()))
    run_dir, socket = f"{tmp_path}/run", f"{tmp_path}/csi.sock"
    with pools.mounted("ext4", tmp_path, pool, size=512 * MIB):
        built = drivers.build(
            engine=files.engine(str(pool), create=True),
            run_dir=run_dir,
            node_id="n",
            target_roots=(str(tmp_path),),
        )
        async with (
            serve.running(built, socket=socket, run_dir=run_dir),
            channel.connect(socket) as connected,
        ):
            co = Co(connected)
            await co.create("thin")
            await co.create("thick", parameters={class_parameters.PROVISIONING: "thick"})
            with monitoring.serving("127.0.0.1:0"):
                (line,) = [vars(record) for record in caplog.records if record.msg == "metrics"]
                async with scraping(tmp_path, line["address"], rules) as address:
                    await asyncio.to_thread(fault, pool)
                    labels = await fires(address, alert)
    assert (labels["severity"], labels["driver"]) == ("critical", OWN_DRIVER)
    assert labels.get("reason") == reason
