"""Who has an image open, and whether a change of it would harm them.

A change that needs librbd's exclusive lock would break the lock of an owner that does not answer (`image_change`). So
whoever watches the image is asked first, by an empty notification, which every client of RBD acknowledges, and a
silent one is a refusal. A lock whose owner does not even watch any more is left alone as long as a sandbox has a
claim on the image (`crust.ceph.claims`); without one nobody uses the image, and librbd may break it.
"""

import time
from dataclasses import dataclass

from crust import errors
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import binding, claim_object, controller_lock, fencing
from crust.ceph.binding import Ioctx
from crust.ceph.cluster_image import lockers, watchers

_ANSWERS_WITHIN_MS = 3000


class RbdClientSilent(errors.NotReady):
    """A client that has an image open does not answer, and a change of the image would cut it off."""

    def __init__(self, image: str, addresses: tuple[str, ...]) -> None:
        super().__init__(
            f"{image} is not changed now",
            why=f"a client that has it open does not answer: {', '.join(addresses) or 'unknown'}; it would be "
            "treated as dead",
            hint="resume the virtual machine, or stop its pod; if its node is gone for good, `crust ceph fence`",
        )
        self.addresses = addresses


@dataclass(frozen=True, slots=True)
class ClientsSeen:
    """The clients that had an image open when they were asked and answered, and when that was."""

    image: str
    header: str
    """The object that they watch."""
    clients: tuple[str, ...]
    at_s: float

    def silent(self) -> RbdClientSilent:
        """What to raise when one of them does not answer any more."""
        return RbdClientSilent(self.image, self.clients)


def now_s() -> float:
    """Suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def check_unused(place: Place, ioctx: Ioctx, name: str) -> None:
    """Raise `StillAttached` while a client has the image open, or a sandbox has a claim on it.

    Clients that have ended are cut off first: what they have sent would be written into an image that is gone.
    """
    fencing.cut_off(place.claimed(ioctx, name))
    with place.image(ioctx, name) as image:
        found = controller_lock.unknown_clients(ioctx, lambda: watchers(image))
    if found:
        raise StillAttached(name, f"an image that {', '.join(sorted(found))} has open")
    for holder in claim_object.read(ioctx, name).claims.holders:
        raise StillAttached(name, f"an image that {holder.shown} has claimed")


def check_answers(place: Place, ioctx: Ioctx, name: str) -> ClientsSeen:
    """Raise `RbdClientSilent` if a change would break the lock of a client; returns who was asked."""
    at_s = now_s()
    with place.image(ioctx, name) as image:
        found, header = tuple(sorted(watchers(image))), f"rbd_header.{image.id()}"
        owners = lockers(image)
    if found and not answer(ioctx, header):
        raise RbdClientSilent(name, found)
    gone = tuple(sorted(owners.difference(found)))
    if gone and claim_object.read(ioctx, name).claims.holders:
        raise RbdClientSilent(name, gone)
    return ClientsSeen(name, header, found, at_s)


def answer(ioctx: Ioctx, header: str) -> bool:
    """Whether all clients acknowledge a notification, which to them says that the header may have changed."""
    try:
        return bool(ioctx.notify(header, "", _ANSWERS_WITHIN_MS))
    except binding.load().rados.TimedOut:
        return False
