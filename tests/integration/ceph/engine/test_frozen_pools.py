"""Pools of earlier commits in Ceph: the layout of the present schema, which is opened, and as which a pool is made.

Schema 3 is the first that is kept: schema 2 did not say who may parse a content, so it is refused (`rbd.pool`).
"""

import json
from types import SimpleNamespace

import pytest

from crust.blockdriver.engines.rbd import pool
from crust.blockdriver.snapshots.content_source import SourceRequest
from crust.core import volumes
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import frozen_namespaces
from tests.support.ceph.rbd_controllers import Controllers, created
from tests.support.drivers.block_driver import DirectCo
from tests.support.records.frozen_pools import NEW_NUMBER, check_has, check_read

FROZEN = frozen_namespaces.load(f"rbd-{pool.SCHEMA}-82e74bf9")


async def test_ceph_pool_of_an_earlier_commit_is_read_and_used(
    controllers: Controllers, ceph: CephCluster
) -> None:
    with ceph.ioctx(POOL, controllers.namespace) as ioctx:
        frozen_namespaces.lay_out(FROZEN, ioctx, ceph.fsid)
    driver = controllers.start()
    stores = driver.stores
    check_read(stores)
    volume_ids = stores.volume_records.index.page()
    for volume_id in volume_ids:
        assert driver.controller.health_check.examine(volume_id).findings == ()
    raw = volumes.VolumeId(stores.pool.ids.volume_id("raw"))
    copy = await created(driver, "copy", SourceRequest("volume", raw))
    for volume_id in {copy, *volume_ids} - {volumes.VolumeId(stores.pool.ids.volume_id("mounted"))}:
        driver.controller.provisioner.delete(volume_id)
    driver.controller.snapshots.delete(stores.pool.ids.snapshot_id("snap"))
    assert len(stores.volume_records.index.page()) == 1


async def test_ceph_pool_is_made_in_the_layout_of_its_schema(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field may be added to a record; each other difference needs a new number."""
    with monkeypatch.context() as patched:
        same = SimpleNamespace(token_hex=lambda _: frozen_namespaces.POOL_ID)
        patched.setattr(pool, "secrets", same)
        driver = controllers.start()
    await frozen_namespaces.fill(DirectCo(driver))
    with ceph.ioctx(POOL, controllers.namespace) as ioctx:
        made = frozen_namespaces.taken(ioctx, ceph.fsid)
    for kind, things in FROZEN.items():
        assert made[kind].keys() == things.keys(), NEW_NUMBER
    check_has(made["images"], FROZEN["images"], "images")
    for name, values in FROZEN["objects"].items():
        assert made["objects"][name].keys() == values.keys(), f"{name}: {NEW_NUMBER}"
        for key, text in values.items():
            if not key.startswith(("v.", "f.")):  # digests
                check_record(made["objects"][name][key], text, f"{name}: {key}")


def check_record(made: str, frozen: str, path: str) -> None:
    """Both are JSON; a pool's identity has the time at which it was made."""
    before = json.loads(frozen)
    before.pop("created", None)
    check_has(json.loads(made), before, path)
