"""Pools in Ceph as tests/data/pools has them (`rbd-….json`): the driver's objects and the images of a namespace.

A file is named by the schema and by the commit whose driver made the pool. Objects have their keys and values; images
have their size, metadata and snapshots, and neither data nor parents. The ids are those of the pool 0123456789abcdef,
in the cluster FSID. The lock is free, and there are no claims.
"""

import json
from pathlib import Path
from typing import Any

import rbd

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.controller_lock import OBJECT as LOCK
from tests.support.co import MIB, Co, encoded
from tests.support.drivers.block_driver import block, mount

_DATA = Path(__file__).parents[2] / "data" / "pools"
POOL_ID = "0123456789abcdef"
FSID = "FSID"

Frozen = dict[str, dict[str, Any]]
"""The objects and the images, by name."""


def load(name: str) -> Frozen:
    """The pool of a file."""
    frozen: Frozen = json.loads((_DATA / f"{name}.json").read_text())
    return frozen


def taken(ioctx: Any, fsid: str) -> Frozen:
    """The pool in a namespace, described as a frozen one."""
    names = sorted(str(listed.key) for listed in ioctx.list_objects())
    objects = {
        name: {} if name == LOCK else _values(ioctx, name, fsid)
        for name in names
        if name.startswith("crust.") and not name.startswith("crust.claim.")
    }
    images = {name: _image(ioctx, name) for name in sorted(rbd.RBD().list(ioctx))}
    return {"objects": objects, "images": images}


def _values(ioctx: Any, name: str, fsid: str) -> dict[str, str]:
    values = omap.read(ioctx, name, "")
    return {key: value.decode().replace(fsid, FSID) for key, value in values}


def _image(ioctx: Any, name: str) -> dict[str, Any]:
    with rbd.Image(ioctx, name, read_only=True) as image:
        return {
            "size": image.size(),
            "features": image.features() & ~rbd.RBD_FEATURE_OPERATIONS,  # librbd's, of a parent
            "metadata": dict(image.metadata_list()),
            "snapshots": sorted(snap["name"] for snap in image.list_snaps()),
        }


def lay_out(frozen: Frozen, ioctx: Any, fsid: str) -> None:
    """Make a pool in an empty namespace."""
    for name, values in frozen["objects"].items():
        omap.make(ioctx, name)
        if values:
            encoded_values = {
                key: text.replace(FSID, fsid).encode() for key, text in values.items()
            }
            omap.swap(ioctx, name, {}, encoded_values)
    for name, of in frozen["images"].items():
        rbd.RBD().create(ioctx, name, of["size"], old_format=False, features=of["features"])
        with rbd.Image(ioctx, name) as image:
            for key, value in of["metadata"].items():
                image.metadata_set(key, value)
            for snapshot in of["snapshots"]:
                image.create_snap(snapshot)


async def fill(co: Co) -> None:
    """Make in a new pool what each frozen pool has: each kind of record."""
    mounted = (await co.create("mounted", encoded(mount()), size=16 * MIB)).volume_id
    raw = (await co.create("raw", encoded(block()), size=4 * MIB)).volume_id
    await co.attach(mounted, "controller")
    snapshot = await co.snapshot(mounted)
    await co.group(mounted, raw, name="group")
    await co.create("restored", encoded(mount()), size=16 * MIB, snapshot=snapshot.snapshot_id)
