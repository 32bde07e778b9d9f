"""The capabilities of a user for one volume: its image can be opened and written, and no other image's data be read.

Objects are named by prefixes, which Ceph compares: those of an image have its id, the claim has its name. A clone
reads what it shares with the images that it was made from, so these are there to be read, until it is flattened. The
records of the namespace can be read. The content record, which nodes write, is in an object of the volume.
"""

from collections.abc import Iterator

from crust.ceph.binding import Ioctx, load
from crust.ceph.claim_object import PREFIX
from crust.ceph.controller_lock import OBJECT

CONTENT = "crust.content."
"""The object with the content record of a volume, before its id."""
MONITORS = "allow r"
_MOST_ANCESTORS = 100


def of_volume(ioctx: Ioctx, pool: str, namespace: str, image: str) -> str:
    """What `osd` has in the capabilities of the user. Raises the binding's own errors."""
    own, *ancestors = _ids(ioctx, image)
    written = [*_objects(own), f"{PREFIX}{image}", f"{CONTENT}{image}"]
    read = [f"rbd_id.{image}", "rbd_directory", "crust.pool", "crust.records.", OBJECT]
    for each in ancestors:
        read += _objects(each)
    where = f"pool={pool} namespace={namespace} object_prefix"
    caps = [f"allow rwx {where} {each}" for each in written]
    caps += [f"allow rx {where} {each}" for each in read]
    # in the pool's default namespace: which namespaces there are
    caps += [f"allow rx pool={pool} object_prefix {each}" for each in ("rbd_namespace", "rbd_info")]
    return ", ".join(caps)


def _objects(image_id: str) -> list[str]:
    return [f"rbd_data.{image_id}.", f"rbd_header.{image_id}", f"rbd_object_map.{image_id}"]


def _ids(ioctx: Ioctx, image: str) -> Iterator[str]:
    """The image's id, and those of the images that it shares data with; one of them may be in the trash."""
    rbd = load().rbd
    wanted = {"name": image}
    for _ in range(_MOST_ANCESTORS):
        with rbd.Image(ioctx, read_only=True, **wanted) as found:
            yield str(found.id())
            try:
                wanted = {"image_id": str(found.parent_id())}
            except rbd.ImageNotFound:
                return
