"""Images of the Ceph engine, as a test names, writes and reads them."""

import hashlib
from typing import Any

from crust.blockdriver.ceph import binding, cluster_image, omap
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import Image
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.images import user_snapshots
from crust.blockdriver.engines.rbd.records import object_name
from crust.core import volumes

MIB = 1024**2
OBJECT = 4 * MIB
SIZE = 16 * MIB


def volume(name: str) -> volumes.VolumeId:
    """The id of a volume of a pool."""
    return volumes.VolumeId(f"0123456789abcdef-{hashlib.sha256(name.encode()).hexdigest()[:40]}")


def snapshot_of(volume_id: volumes.VolumeId, name: str) -> Image:
    digest = hashlib.sha256(name.encode()).hexdigest()[:40]
    return Image(f"0123456789abcdef-snap-{digest}", volume_id, SIZE)


A, B, C, D = volume("a"), volume("b"), volume("c"), volume("d")


def write(ioctx: Any, name: str, data: bytes, offset: int = 0) -> None:
    import rbd

    with rbd.Image(ioctx, name) as image:
        image.write(data, offset)
        image.flush()


def read(ioctx: Any, name: str, length: int, offset: int = 0) -> bytes:
    import rbd

    with rbd.Image(ioctx, name, read_only=True) as image:
        content: bytes = image.read(offset, length)
        return content


RECORDS = {RecordKind.VOLUMES: b"a volume", RecordKind.CONTENT: b"its content"}


def create(engine: RbdProvisioning, volume_id: volumes.VolumeId, size_bytes: int) -> None:
    """Make a volume of zeros."""
    with engine.making(volume_id) as making:
        making.create(size_bytes)
        making.commit(RECORDS)


def restore(
    engine: RbdProvisioning, volume_id: volumes.VolumeId, image: Image, size_bytes: int
) -> None:
    """Make a volume from a snapshot."""
    with engine.making(volume_id) as making:
        making.restore(image, size_bytes)
        making.commit(RECORDS)


def clone(
    engine: RbdProvisioning,
    volume_id: volumes.VolumeId,
    source: volumes.VolumeId,
    *,
    source_bytes: int,
    size_bytes: int,
) -> None:
    """Make a volume from another one."""
    with engine.making(volume_id) as making:
        making.clone(source, source_bytes=source_bytes, size_bytes=size_bytes)
        making.commit(RECORDS)


def take(engine: RbdProvisioning, image: Image) -> None:
    """Take a single snapshot."""
    with engine.taking(image.snapshot_id, [image]) as taking:
        taking.take(image)
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})


def drop(engine: RbdProvisioning, image: Image) -> None:
    """Delete a single snapshot."""
    engine.remove_set(image.snapshot_id, [image])


def note_removal(engine: RbdProvisioning, volume_id: volumes.VolumeId) -> None:
    """Note as a controller does that is killed while it removes the volume."""
    record = engine.volume_records.load(volume_id)
    if record is not None:
        engine.volume_records.begin_removal(volume_id, record, record)
        return
    with engine.place.ioctx("cannot note") as ioctx:
        omap.swap(
            ioctx, object_name(RecordKind.VOLUMES), {}, {f"i.{volume_id}": b"remove a volume"}
        )


def id_of(ioctx: Any, name: str) -> str:
    import rbd

    with rbd.Image(ioctx, name, read_only=True) as image:
        return str(image.id())


def ceph_text(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def trash(engine: RbdProvisioning) -> list[str]:
    with engine.place.ioctx("cannot list") as ioctx:
        return [image["name"] for image in binding.load().images.trash_list(ioctx)]


def names(engine: RbdProvisioning) -> list[str]:
    with engine.place.ioctx("cannot list") as ioctx:
        return engine.place.names(ioctx)


def present(engine: RbdProvisioning) -> set[str]:
    """The snapshots of all images, those of unfinished sets included."""
    with engine.place.ioctx("cannot list") as ioctx:
        snapshots = set()
        for name in engine.place.names(ioctx):
            with engine.place.image(ioctx, name) as image:
                snapshots.update(user_snapshots(image))
        return snapshots


def lock_owners(engine: RbdProvisioning, name: str) -> frozenset[str]:
    """The clients that have RBD's lock."""
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, name) as image:
        return cluster_image.lockers(image)


def wait_until_forgotten(engine: RbdProvisioning, name: str) -> None:
    """Until the OSD treats the frozen clients as dead, and librbd may break their locks."""
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, name) as image:
        while cluster_image.watchers(image):
            pass
