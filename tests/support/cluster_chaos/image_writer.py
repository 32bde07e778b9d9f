"""A process that has an image of RBD open and writes stamps, one block after the other: what a virtual machine is.

It takes the image as a runtime does: claim, open, record, write; at the end close, give back. Each block says which
session wrote it. An acknowledged one is noted in the image's journal. A session begins behind the last stamp that it
finds, so two sessions that write at the same time meet in the same blocks, and one loses what was acknowledged.

As `fence` it declares a node gone and cuts its holder off. Without claims it only opens the image.
"""

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crust import errors
from crust.ceph import claims, fencing
from crust.ceph.claim_object import Mode
from crust.ceph.user import CephUser, Timeouts
from examples.cluster.ceph_cluster import POOL
from tests.support.cluster_chaos.journal import Journal

BLOCK_BYTES = 1024
_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class WriterCommand:
    """What the process is told by its standard input, as JSON."""

    monitors: str
    user: str
    key: str
    namespace: str
    image: str
    node: str
    session: int
    journal: str
    fence: bool = False
    with_claims: bool = True


def main() -> int:
    """Read the order and carry it out until standard input ends; 0 if the image was given back or fenced."""
    import rados

    order = WriterCommand(**json.loads(sys.stdin.readline()))
    given = CephUser(order.monitors, order.user, order.key)
    timeouts = Timeouts(connect_s=20, monitors_s=60, data_s=60)
    journal = Journal(Path(order.journal))
    try:
        with (
            rados.Rados(rados_id=order.user, conf=given.options(timeouts)) as cluster,
            cluster.open_ioctx(POOL) as ioctx,
        ):
            ioctx.set_namespace(order.namespace)
            if order.fence:
                fencing.fence(cluster, ioctx, order.image, order.node, even_if_connected=True)
            else:
                # As a node's own connections: breaking the lock of an ended client needs no right to blocklist.
                cluster.conf_set("rbd_blocklist_on_break_lock", "false")
                # As QEMU with cache.direct. With librbd's cache 3 of 63 sessions that were fenced while they wrote
                # had a flush answered OK whose block was never written.
                cluster.conf_set("rbd_cache", "false")
                _write(ioctx, order, journal)
    except (errors.CrustError, rados.Error, OSError) as error:
        journal.write("ended", session=order.session, why=str(error)[:300])
        return 1
    except Exception as error:  # rbd's own errors are of no common class that mypy knows
        journal.write("ended", session=order.session, why=repr(error)[:300])
        return 1
    return 0


def _write(ioctx: Any, order: WriterCommand, journal: Journal) -> None:
    import rbd

    if not order.with_claims:
        with rbd.Image(ioctx, order.image) as image:
            _stamp(image, order, journal)
        return
    holder = f"session-{order.session}"
    host = claims.Host(order.node, f"machine-{order.node}")
    claims.take(ioctx, order.image, Mode.WRITER, host, holder, holder)
    with rbd.Image(ioctx, order.image) as image:
        claims.record(ioctx, order.image, holder)
        _stamp(image, order, journal)
    claims.give_back(ioctx, order.image, holder)
    journal.write("given-back", session=order.session)


def _stamp(image: Any, order: WriterCommand, journal: Journal) -> None:
    stop = threading.Event()
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    block = _first_free(image)
    last = image.size() // BLOCK_BYTES
    sys.stdout.write("writing\n")
    sys.stdout.flush()
    while not stop.wait(_PERIOD_S) and block < last:
        stamp = {"session": order.session, "node": order.node, "block": block}
        image.write(json.dumps(stamp).encode().ljust(BLOCK_BYTES), block * BLOCK_BYTES)
        image.flush()
        journal.write("written", session=order.session, block=block)
        block += 1


def _wait_for_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _first_free(image: Any) -> int:
    """Stamps are without gaps, so it is found by halves."""
    low, high = 0, image.size() // BLOCK_BYTES
    while low < high:
        middle = (low + high) // 2
        if image.read(middle * BLOCK_BYTES, 1) == b"{":
            low = middle + 1
        else:
            high = middle
    return low


if __name__ == "__main__":
    sys.exit(main())
