"""Cuts clients off from the cluster, before another client gets an image that they had.

Writes of a process may arrive after its end: its host's kernel repeats the data of a socket for minutes, and an OSD
works off its queue. An OSD does not check a lock for RBD's writes. It checks the blocklist, and refuses all requests
from an address there, even older ones. So a claim whose client did not close the image is moved to the ended
(`claims`, `fence`), and `cut_off` is the only way from there to a free image:

    1. every address that could write is blocklisted: the recorded ones; and if the client of a holder was not
       recorded, all other clients that have the image open, except the active controller (`controller_lock`)
    2. this client waits for the map with the blocklist. Each later client has that map, or a newer one, and an OSD
       answers it only with that map: so no older write can follow the reads and writes of a later client
    3. no such client watches the image any more, and its lock is broken
    4. the ended are removed from the claims

A process that dies between two steps leaves the ended, and the next process does all steps again. Two processes may
do so at once: an address belongs to one client for ever, and a second blocklisting harms nobody. A connected client
without a record counts as an ended holder's only if the claims were the same before and after the look for it:
nobody can have taken the image in between.

A controller has the right to blocklist; a node has it only if its user has the right for the addresses of its hosts.
A process without it frees nothing (`ImageNotCutOff`): the controller's background work does so within seconds.

The blocklist's expiry is years. A client that slept through a shorter expiry would take RBD's lock again, and
overwrite the data of its successor.

The caller of `fence` must know from an operator that the node is gone (`crust ceph fence`). If a client still watches
the image, its virtual machine runs: `fence` refuses that, unless the operator insists.
"""

import threading
from contextlib import suppress
from dataclasses import replace

from crust.blockdriver.ceph import binding, claim_object, cluster_image, controller_lock
from crust.blockdriver.ceph.claim_object import Claims, Holder
from crust.blockdriver.ceph.cluster_image import ClusterImage
from crust.core import errors

WATCH_GONE_S = 40.0
"""A watch of a blocklisted client ends at once, or, if the OSD has not noticed, after 30 s."""
_LOOK_EVERY_S = 0.1


class ImageNotCutOff(errors.NotReady):
    def __init__(self, image: str, ended: tuple[Holder, ...], user: str = "") -> None:
        clients = [f"{holder.address or 'the client'} of {holder.shown}" for holder in ended]
        may_not = f", and client.{user} may not" if user else ""
        super().__init__(
            f"the image {image} is not free yet",
            why=f"{'; '.join(clients)} ended without closing it: its writes may still arrive until the cluster has "
            f"blocklisted it{may_not}",
            hint="wait: the driver's controller does it within seconds, if it runs and serves this pool; else "
            f"`crust ceph fence {ended[0].node} --image {image}`",
        )


def cut_off(image: ClusterImage) -> tuple[str, ...]:
    """Cut off the clients of the ended holders, and free the image; returns the blocklisted addresses.

    Raises `ImageNotCutOff` without the right to blocklist, StillWatched, `claim_object.UnreadableImageClaim`, and the
    errors of the connection and the binding; then the ended holders stay.
    """
    while True:
        read = claim_object.read(image.ioctx, image.name)
        ended = read.claims.ended
        addresses = _addresses(image, read.claims) if ended else frozenset[str]()
        if claim_object.read(image.ioctx, image.name).cookie == read.cookie:
            break
    if addresses:
        try:
            image.client.blocklist(sorted(addresses))
        except binding.CephNotPermitted as err:
            raise ImageNotCutOff(image.name, ended, err.user) from err
        pause = threading.Event()
        for _ in range(round(WATCH_GONE_S / _LOOK_EVERY_S)):
            still_watching = image.watchers() & addresses
            if not still_watching:
                break
            pause.wait(_LOOK_EVERY_S)
        else:
            raise errors.NotReady.named(
                "StillWatched",
                f"the holders of the image {image.name} are not cut off yet",
                why=f"{', '.join(sorted(still_watching))} is still listed",
            )
        if image.not_closed(addresses):
            image.break_locks(addresses)
    # a holder that has ended since stays
    claim_object.changed(
        image.ioctx,
        image.name,
        lambda claims: replace(
            claims, ended=tuple(holder for holder in claims.ended if holder not in ended)
        ),
    )
    return tuple(sorted(addresses))


def fence(image: ClusterImage, node: str, *, even_if_connected: bool = False) -> tuple[str, ...]:
    """Cut off the holders on `node` and free the image; returns the blocklisted addresses.

    The caller has declared that the node is gone. A node without a claim is a success. Raises HolderConnected, and
    the errors of `cut_off`.
    """

    def ended(claims: Claims) -> Claims:
        victims = tuple(holder for holder in claims.holders if holder.node == node)
        present = image.watchers() if victims else frozenset[str]()
        connected_holder = next((victim for victim in victims if victim.address in present), None)
        if connected_holder is not None and not even_if_connected:
            raise errors.NotReady.named(
                "HolderConnected",
                f"node {connected_holder.node} is not cut off from the image {image.name}",
                why=f"its client {connected_holder.address} is connected: {connected_holder.shown} uses the image",
            )
        return with_ended(claims, victims)

    # by compare-and-swap: a claim of another node that came in between does not change
    claim_object.changed(image.ioctx, image.name, ended)
    return cut_off(image)


def with_ended(claims: Claims, holders: tuple[Holder, ...]) -> Claims:
    """The claims after these holders have ended without closing the image."""
    remaining = tuple(holder for holder in claims.holders if holder not in holders)
    return replace(claims, holders=remaining, ended=(*claims.ended, *holders))


def _addresses(image: ClusterImage, claims: Claims) -> frozenset[str]:
    """The addresses to blocklist: the recorded clients of the ended.

    A holder without a recorded client has no guest yet, and its next step fails (`claims.record`). Any other client
    that has the image open may be its client, unless another holder is about to open the image.
    """
    recorded = frozenset(holder.address for holder in claims.ended if holder.address)
    is_all = all(holder.address for holder in claims.ended)
    if is_all or any(not holder.address for holder in claims.holders):
        return recorded
    known = {*recorded, *(holder.address for holder in claims.holders), image.client.address()}

    def look() -> frozenset[str]:
        # opened after the controller's lock was read: the lockers may be those of the open
        with image.opened() as opened:
            return (cluster_image.watchers(opened) | cluster_image.lockers(opened)) - known

    with suppress(binding.load().rbd.ImageNotFound):
        return recorded | controller_lock.unknown_clients(image.ioctx, look)
    return recorded
