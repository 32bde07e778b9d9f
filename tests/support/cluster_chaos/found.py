"""What lies in the pools of files and in a namespace of Ceph, read without crust's code.

A pool has records/ID.json, images/ID.img, snapshots/ID.json and images/ID.snap; a namespace has the images, and
crust.records.records and crust.records.snapshots with the keys d.ID. The image of a deleted volume is kept as
`deleted.…` as long as it has snapshots.

Which image it is tells one that was answered from an empty one that was made in its place: librbd's id of the image
and the number of the snapshot, and for a file an attribute that it was given when it was answered (`identity`).
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "user.crust-chaos"
DELETED = "deleted."
_TIMEOUT_S = "30"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A volume or snapshot that was found."""

    record: dict[str, Any] | None
    path: Path | None
    size: int
    """Bytes of the image; 0 if there is none."""
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Ceph:
    """Where the namespace is."""

    conf: str
    pool: str
    namespace: str

    @contextlib.contextmanager
    def ioctx(self) -> Iterator[Any]:
        """The namespace, as the administrator."""
        import rados

        times = ("client_mount_timeout", "rados_osd_op_timeout", "rados_mon_op_timeout")
        with (
            rados.Rados(
                conffile=self.conf, name="client.admin", conf=dict.fromkeys(times, _TIMEOUT_S)
            ) as cluster,
            cluster.open_ioctx(self.pool) as ioctx,
        ):
            ioctx.set_namespace(self.namespace)
            yield ioctx


def marked(pool: Path, id_: str, mark: str) -> str:
    """Mark the image of a volume or snapshot in a pool of files; returns the mark, or "" if there is no image."""
    suffix = "snap" if "-snap-" in id_ else "img"
    try:
        os.setxattr(pool / "images" / f"{id_}.{suffix}", MARK, mark.encode())
    except FileNotFoundError:
        return ""
    return mark


def identity(ceph: Ceph, image: str, snapshot: str = "") -> str:
    """Which image of Ceph that is, or which snapshot of it; "" if there is none. Raises `ConnectionError`."""
    import rados
    import rbd

    try:
        with ceph.ioctx() as ioctx, rbd.Image(ioctx, image, read_only=True) as there:
            if not snapshot:
                return str(there.id())
            return _snapshots(there).get(snapshot, ("", 0))[0]
    except rbd.ImageNotFound:
        return ""
    except (rados.Error, rbd.Error) as error:
        raise ConnectionError(str(error)) from error


def trash(ceph: Ceph) -> list[str]:
    """The ids of the images in the trash, which a controller empties."""
    import rbd

    with ceph.ioctx() as ioctx:
        return [str(each["id"]) for each in rbd.RBD().trash_list(ioctx)]


def in_pool(directory: Path) -> dict[str, StoredObject]:
    """Volumes and snapshots of a pool of files."""
    records = {
        path.stem: json.loads(path.read_bytes())
        for folder in ("records", "snapshots")
        for path in (directory / folder).glob("*.json")
    }
    images = {
        path.stem: path
        for suffix in ("img", "snap")
        for path in (directory / "images").glob(f"*.{suffix}")
    }
    return {id_: _file(records.get(id_), images.get(id_)) for id_ in {*records, *images}}


def in_ceph(
    ceph: Ceph, wrong: Callable[[str, str], None], look: Callable[[str, Any], None]
) -> dict[str, StoredObject]:
    """Volumes and snapshots of the namespace. `look` is called with each image, open."""
    import rbd

    images: dict[str, tuple[str, int]] = {}
    with ceph.ioctx() as ioctx:
        for name in rbd.RBD().list(ioctx):
            try:
                there = rbd.Image(ioctx, name, read_only=True)
            except rbd.ImageNotFound:
                wrong("name without image in Ceph", name)
                continue
            with there:
                snapshots = _snapshots(there)
                images |= snapshots
                if not name.startswith(DELETED):
                    images[name] = (str(there.id()), there.size())
                elif not snapshots:
                    wrong("kept image of a deleted volume without snapshots", name)
                look(name, there)
        records = _omap(ioctx, "crust.records.records") | _omap(ioctx, "crust.records.snapshots")
    return {id_: _image(records.get(id_), images.get(id_)) for id_ in {*images, *records}}


def _file(record: dict[str, Any] | None, path: Path | None) -> StoredObject:
    if path is None:
        return StoredObject(record, None, 0)
    try:
        mark = os.getxattr(path, MARK).decode()
    except OSError:
        mark = ""
    return StoredObject(record, path, path.stat().st_size, mark)


def _image(record: dict[str, Any] | None, image: tuple[str, int] | None) -> StoredObject:
    which, size = image or ("", 0)
    return StoredObject(record, None, size, which)


def _snapshots(image: Any) -> Mapping[str, tuple[str, int]]:
    """By name; those that were deleted and are kept for clones are in a namespace of their own."""
    import rbd

    return {
        each["name"]: (f"{image.id()}@{each['id']}", each["size"])
        for each in image.list_snaps()
        if each["namespace"] == rbd.RBD_SNAP_NAMESPACE_TYPE_USER
    }


def _omap(ioctx: Any, name: str) -> dict[str, dict[str, Any]]:
    op = ioctx.create_read_op()
    try:
        values, _ = ioctx.get_omap_vals(op, "", "d.", 10_000)
        ioctx.operate_read_op(op, name)
        return {key.removeprefix("d."): json.loads(value) for key, value in values}
    finally:
        ioctx.release_read_op(op)
