"""Cutting clients off from the cluster, before anybody else gets an image that they had.

What a process has sent arrives also when the process has ended: its host's kernel sends again for minutes what lies
in a socket, and an OSD carries out what lies in its queue. RBD's writes carry no lock that an OSD would look at. It
looks at the blocklist, and refuses what comes from an address there, also what was sent before. So a claim whose
client did not close the image is put among the ended (`claims`, `fence`), and `cut_off` is the only
way from there to a free image:

    1. every address that could write is blocklisted: the recorded ones; and if the client of a holder was not
       recorded, whoever else has the image open, but not the active controller (`controller_lock`)
    2. this client waits for the map with the blocklist. Each later client has that map, or a newer one, and an OSD
       answers it only with that map: so it reads and writes nothing behind which an older write could land
    3. no such client watches the image any more, and its lock is broken
    4. the ended are removed from the claims

A process that dies between two steps leaves the ended, and the next one does all steps again. So do two at once: an
address is of one client for ever, and to blocklist it again harms nobody. A client that is connected and not recorded
is believed to be that of an ended holder only if the claims were the same before and after it was looked for: nobody
can have taken the image in between.

A controller has the right to blocklist, a node only if its user was given that for the addresses of its hosts. A
process without it frees nothing (`ImageNotCutOff`): the controller's background work does so within seconds.

The blocklist's expiry is years. A client that slept through a shorter one comes back as if nothing had happened,
takes RBD's lock, and overwrites what its successor wrote.

Who may be fenced: the caller has to know from an operator that the node is gone (`crust ceph fence`). A client that
still watches the image is connected, so its virtual machine runs: it is refused, unless the operator insists.
"""

import threading
from dataclasses import replace

from crust.ceph import claim_object, cluster_image, controller_lock
from crust.ceph.binding import load
from crust.ceph.claim_object import Claims, Holder
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.failures import CephNotPermitted
from crust.core import errors

WATCH_GONE_S = 40.0
"""A watch of a blocklisted client ends at once; one that the OSD has not looked at, after 30 s."""
_LOOK_EVERY_S = 0.1


class ImageNotCutOff(errors.NotReady):
    """A client that did not close the image is not blocklisted yet, so that what it has sent may still arrive."""

    def __init__(self, image: str, ended: tuple[Holder, ...], user: str = "") -> None:
        whose = "; ".join(f"{each.address or 'the client'} of {each.shown}" for each in ended)
        may_not = f", and client.{user} may not" if user else ""
        super().__init__(
            f"the image {image} is not free yet",
            why=f"{whose} ended without closing it: what it has sent may still arrive until the cluster has "
            f"blocklisted it{may_not}",
            hint="wait: the driver's controller does it within seconds, if it runs and serves this pool; else "
            f"`crust ceph fence {ended[0].node} --image {image}`",
        )


def cut_off(image: ClusterImage) -> tuple[str, ...]:
    """Cut off the clients of the ended holders, and free what they held; returns the blocklisted addresses.

    Raises `ImageNotCutOff` without the right to blocklist, StillWatched, `claim_object.UnreadableImageClaim`, what
    the connection raises, and the binding's own errors; then the image is nobody's as before.
    """
    ended, addresses = _to_cut_off(image)
    if addresses:
        try:
            image.client.blocklist(sorted(addresses))
        except CephNotPermitted as err:
            raise ImageNotCutOff(image.name, ended, err.user) from err
        _wait_unwatched(image, addresses)
        if image.not_closed(addresses):
            image.break_locks(addresses)

    def freed(now: Claims) -> Claims:
        """Without those that are cut off. One that has ended since stays."""
        return replace(now, ended=tuple(each for each in now.ended if each not in ended))

    claim_object.changed(image.ioctx, image.name, freed)
    return tuple(sorted(addresses))


def fence(image: ClusterImage, node: str, *, even_if_connected: bool = False) -> tuple[str, ...]:
    """Cut off the holders on `node` and free the image; returns the blocklisted addresses.

    The caller has declared that the node is gone. A node that has no claim is a success. Raises HolderConnected,
    and what `cut_off` raises.
    """

    def ended(now: Claims) -> Claims:
        victims = now.of_node(node)
        present = image.watchers() if victims else frozenset[str]()
        connected = next((victim for victim in victims if victim.address in present), None)
        if connected is not None and not even_if_connected:
            raise errors.NotReady.named(
                "HolderConnected",
                f"node {connected.node} is not cut off from the image {image.name}",
                why=f"its client {connected.address} is connected: {connected.shown} uses the image",
                hint="stop the pod there; a node that was switched off is listed as connected for 30 s more",
            )
        return with_ended(now, victims)

    # on exactly what was looked at: a claim of another node that came in between is not touched
    claim_object.changed(image.ioctx, image.name, ended)
    return cut_off(image)


def with_ended(claims: Claims, holders: tuple[Holder, ...]) -> Claims:
    """The claims when these holders have ended without closing the image."""
    left = tuple(holder for holder in claims.holders if holder not in holders)
    return replace(claims, holders=left, ended=(*claims.ended, *holders))


def _to_cut_off(image: ClusterImage) -> tuple[tuple[Holder, ...], frozenset[str]]:
    """The ended holders, and the addresses of their clients."""
    while True:
        found = claim_object.read(image.ioctx, image.name)
        addresses = _addresses(image, found.claims) if found.claims.ended else frozenset[str]()
        if claim_object.read(image.ioctx, image.name).cookie == found.cookie:
            return found.claims.ended, addresses


def _addresses(image: ClusterImage, claims: Claims) -> frozenset[str]:
    """What to blocklist: the recorded clients of the ended.

    The client of a holder that has recorded none has no guest yet, and its next step fails (`claims.record`). Whoever
    else has the image open may be that client, unless another holder is about to open it.
    """
    recorded = frozenset(each.address for each in claims.ended if each.address)
    is_all = all(each.address for each in claims.ended)
    if is_all or any(not holder.address for holder in claims.holders):
        return recorded
    known = {*recorded, *(holder.address for holder in claims.holders), image.client.address()}
    others = controller_lock.unknown_clients(image.ioctx, lambda: _clients(image) - known)
    return recorded | others


def _clients(image: ClusterImage) -> frozenset[str]:
    try:
        with image.opened() as there:
            return cluster_image.watchers(there) | cluster_image.lockers(there)
    except load().rbd.ImageNotFound:
        return frozenset()


def _wait_unwatched(image: ClusterImage, addresses: frozenset[str]) -> None:
    pause = threading.Event()
    for _ in range(round(WATCH_GONE_S / _LOOK_EVERY_S)):
        watching = image.watchers() & addresses
        if not watching:
            return
        pause.wait(_LOOK_EVERY_S)
    raise errors.NotReady.named(
        "StillWatched",
        f"the holders of the image {image.name} are not cut off yet",
        why=f"{', '.join(sorted(watching))} is still listed",
        hint="see `rbd status` and `ceph osd blocklist ls`, then repeat the call",
    )
