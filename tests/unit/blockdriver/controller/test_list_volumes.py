"""Lists report what is lost or damaged; a validation compares with what is."""

import asyncio
import re
from pathlib import Path

import pytest

from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.driver import Driver
from crust.blockdriver.records import models
from crust.blockdriver.records.health import Kind
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB, Mode, mount
from tests.support.drivers.driver_state import create
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.records import pool_layout


async def test_validate_compares_capabilities_and_ignores_the_provisioners_identity(
    state: Driver, provisioner: Provisioner
) -> None:
    made = await provisioner.create(create())
    context = {"storage.kubernetes.io/csiProvisionerIdentity": "1-2-block.csi.crust.dev"}
    many = mount(mode=Mode.MULTI_NODE_MULTI_WRITER)
    for capability, why in ((mount(), "^$"), (mount("xfs"), "is ext4"), (many, "MULTI_NODE")):
        why_not = await asyncio.to_thread(
            state.controller.lister.why_not, made.volume_id, (capability,), context, {}, {}
        )
        assert re.search(why, why_not)


async def test_list_reports_lost_and_damaged_volumes(
    state: Driver, provisioner: Provisioner, tmp_path: Path
) -> None:
    made = [
        (
            await provisioner.create(driver_state.create(f"pvc-{number}", required=16 * MIB))
        ).volume_id
        for number in range(4)
    ]
    well, lost, short, unreadable = made
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    del backend.images[lost]
    backend.images[short] = MIB
    pool_layout.volume_record(tmp_path / "state", unreadable).write_text("{")
    orphan = state.stores.pool.ids.volume_id("unrecorded")
    backend.images[orphan] = MIB
    health = {entry.volume_id: entry for entry in state.controller.lister.health_page(0, "")[0]}
    assert {
        key: [finding.reason for finding in entry.findings] for key, entry in health.items()
    } == {
        well: [],
        lost: ["ImageMissing"],
        short: ["ImageDamaged"],
        unreadable: ["RecordUnreadable"],
        orphan: ["RecordMissing"],
    }
    assert health[lost].findings[0].kind is Kind.DATA_LOSS
    for volume_id, size_bytes in ((unreadable, 16 * MIB), (orphan, MIB)):
        assert (
            f"the {size_bytes} bytes of its size stay reserved"
            in health[volume_id].findings[0].message
        )
    listed = {listed.volume_id: listed for listed in state.controller.lister.page(0, "")[0]}
    assert set(listed) == {well, lost, short, unreadable}
    assert not listed[well].health.condition.abnormal
    assert listed[lost].health.condition.abnormal
    assert listed[unreadable].record is None
    with pytest.raises(models.VolumeNotFound):
        state.controller.health_check.examine(state.stores.pool.ids.volume_id("none"))
