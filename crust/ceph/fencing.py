"""Fencing: the holders of an image are cut off from the cluster, before anybody else gets the image.

    1. the claim is marked as being fenced, by compare-and-swap: from here on nobody takes, records or gives back
    2. every address that could write is blocklisted: the recorded ones; and if the client of a holder was not
       recorded, whoever else has the image open, but no client of crust itself (`own_clients`)
    3. this client waits for the map with the blocklist, and so does every OSD before it serves the next holder
    4. no such client watches the image any more, and its lock is broken
    5. the claim is removed

A process that dies between two steps leaves the mark; the next fencing does all steps again. So do two at once: one
that finds the mark gone has been overtaken, and the image may have its next holder. So what is to be blocklisted is
believed only as long as the claims are what they were before it was looked for, and it ends without another step.

The blocklist's expiry is years. A client that slept through a shorter one comes back as if nothing had happened,
takes RBD's lock, and overwrites what its successor wrote. librbd blocklists the owner of a lock that it breaks by
itself, and for an hour: that would shorten the entry, so it is told the same expiry.

Who may be fenced: the caller has to know from an operator that the node is gone (`crust ceph fence`). A client that
still watches the image is connected, so its virtual machine runs: it is refused, unless the operator insists.
"""

import threading
from contextlib import suppress
from dataclasses import replace

from crust import errors
from crust.ceph import claim_object, own_clients
from crust.ceph.binding import Ioctx, Rados, load
from crust.ceph.claim_object import Claims, Holder, Read
from crust.ceph.claims import (
    ImageBeingFenced,
    break_locks,
    changed,
    lockers,
    opened,
    watchers,
)
from crust.ceph.connection import EXPIRY_S

_EXPIRY_OPTION = ("rbd_blocklist_expire_seconds", str(EXPIRY_S))

_WATCH_GONE_S = 40.0
"""A watch of a blocklisted client ends at once; one that the OSD has not looked at, after 30 s."""
_LOOK_EVERY_S = 0.1


class HolderConnected(errors.NotReady):
    """A holder of the image is connected to the cluster, so its virtual machine runs."""

    def __init__(self, image: str, holder: Holder) -> None:
        super().__init__(
            f"node {holder.node} is not cut off from the image {image}",
            why=f"its client {holder.address} is connected: {holder.shown} uses the image",
            hint="stop the pod there; a node that was switched off is listed as connected for 30 s more",
        )
        self.holder = holder


class StillWatched(errors.NotReady):
    """A blocklisted client is still listed as one that has the image open."""

    def __init__(self, image: str, addresses: frozenset[str]) -> None:
        super().__init__(
            f"the holders of the image {image} are not cut off yet",
            why=f"{', '.join(sorted(addresses))} is still listed",
            hint="see `rbd status` and `ceph osd blocklist ls`, then repeat the call",
        )


def fence(
    cluster: Rados, ioctx: Ioctx, image: str, node: str, *, even_if_connected: bool = False
) -> tuple[str, ...]:
    """Cut off the holders on `node` and free the image; returns the blocklisted addresses.

    The caller has declared that the node is gone. A node that has no claim is a success. Raises `HolderConnected`,
    `StillWatched`, `claims.ImageBeingFenced`, `claim_object.UnreadableImageClaim`, and the binding's own errors.
    """
    cluster.conf_set(*_EXPIRY_OPTION)
    marked = _marked(ioctx, image, node, even_if_connected=even_if_connected)
    if marked is None:
        return ()
    addresses = _cut_off(cluster, ioctx, image, marked, node)
    cluster.wait_for_latest_osdmap()
    _wait_unwatched(ioctx, image, addresses)
    if _present(ioctx, image) is not None:
        with own_clients.noted(ioctx, image, cluster.get_addrs()):
            break_locks(ioctx, image, addresses)
    victims = _on(marked.claims, node)
    changed(ioctx, image, lambda now: _freed(now, node, victims))
    return tuple(sorted(addresses))


def _cut_off(cluster: Rados, ioctx: Ioctx, image: str, marked: Read, node: str) -> frozenset[str]:
    """Blocklist the holders; returns whom. Another fencing may end this one at any moment, and free the image."""
    done: set[str] = set()
    while True:
        wanted = _addresses(cluster, ioctx, image, marked.claims, node)
        for each in sorted(wanted - done):
            now = claim_object.read(ioctx, image)
            if now.cookie != marked.cookie:
                break
            cluster.blocklist_add(each, EXPIRY_S)
            done.add(each)
        else:
            return frozenset(done)
        if now.claims.fencing != node or _on(now.claims, node) != _on(marked.claims, node):
            return frozenset(done)
        marked = now


def _on(claims: Claims, node: str) -> tuple[Holder, ...]:
    return tuple(each for each in claims.holders if each.node == node)


def _marked(ioctx: Ioctx, image: str, node: str, *, even_if_connected: bool) -> Read | None:
    """The claims, marked; None if the node has none.

    The mark is set on exactly what was looked at: a claim of another node that came in between is not touched.
    """
    while True:
        before = claim_object.read(ioctx, image)
        victims = _on(before.claims, node)
        if before.claims.fencing == node:
            return before
        if before.claims.fencing:
            raise ImageBeingFenced(image)
        if not victims:
            return None
        present = _present(ioctx, image) or frozenset()
        connected = next((each for each in victims if each.address in present), None)
        if connected is not None and not even_if_connected:
            raise HolderConnected(image, connected)
        found = claim_object.swap(ioctx, image, before, replace(before.claims, fencing=node))
        if found is not None:
            return found


def _addresses(
    cluster: Rados, ioctx: Ioctx, image: str, claims: Claims, node: str
) -> frozenset[str]:
    """What to blocklist: the recorded clients of the holders.

    The client of a holder that has recorded none has no guest yet, and its next step fails (`claims.record`). Whoever
    else has the image open may be that client, unless one of another node is about to open it.
    """
    victims = _on(claims, node)
    recorded = frozenset(each.address for each in victims if each.address)
    staying = [each for each in claims.holders if each.node != node]
    if all(each.address for each in victims) or any(not each.address for each in staying):
        return recorded
    spared = {each.address for each in staying} | {cluster.get_addrs()}
    with suppress(load().rbd.ImageNotFound), opened(ioctx, image, read_only=True) as there:
        recorded |= own_clients.unknown_clients(
            ioctx, image, lambda: (watchers(there) | lockers(there)) - spared
        )
    return recorded


def _present(ioctx: Ioctx, image: str) -> frozenset[str] | None:
    """The clients that watch the image; None if there is no image any more."""
    try:
        with opened(ioctx, image, read_only=True) as there:
            return watchers(there)
    except load().rbd.ImageNotFound:
        return None


def _freed(now: Claims, node: str, victims: tuple[Holder, ...]) -> Claims | None:
    if now.fencing != node or _on(now, node) != victims:  # another fencing was first
        return now
    left = tuple(each for each in now.holders if each.node != node)
    return replace(now, holders=left, fencing="", ended=()) if left else None


def _wait_unwatched(ioctx: Ioctx, image: str, addresses: frozenset[str]) -> None:
    pause = threading.Event()
    for _ in range(round(_WATCH_GONE_S / _LOOK_EVERY_S)):
        watching = (_present(ioctx, image) or frozenset()) & addresses
        if not watching:
            return
        pause.wait(_LOOK_EVERY_S)
    raise StillWatched(image, watching)
