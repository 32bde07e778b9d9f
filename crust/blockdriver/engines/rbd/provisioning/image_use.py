"""Who has an image open, and whether a change of it would harm them.

A change that needs librbd's exclusive lock would break the lock of an owner that does not answer (`image_change`). So
whoever watches the image is asked first, by an empty notification, which every client of RBD acknowledges, and a
silent one is a refusal. A lock whose owner does not even watch any more is left alone as long as a sandbox has a
claim on the image (`crust.ceph.claims`); without one nobody uses the image, and librbd may break it.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import binding, claim_object, claims, controller_lock, fencing
from crust.ceph.binding import Ioctx
from crust.ceph.cluster_image import lockers, watchers
from crust.ceph.failures import ignoring
from crust.core import errors

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
    _unclaimed(ioctx, name)


def _unclaimed(ioctx: Ioctx, name: str) -> claim_object.Read:
    """The claims, which are nobody's, or those of a deletion that was begun."""
    seen = claim_object.read(ioctx, name)
    for holder in seen.claims.holders:
        if not holder.is_deletion:
            raise StillAttached(name, f"an image that {holder.shown} has claimed")
    return seen


@contextmanager
def deleting(place: Place, ioctx: Ioctx, name: str) -> Iterator[None]:
    """Nobody takes the image while it is removed inside the block: the controller has it. Raises `StillAttached`.

    A block that fails leaves the controller's claim, and the next deletion goes on. In a full pool no object can be
    made: an image that has no claim object can be taken by nobody there either.
    """
    try:
        check_unused(place, ioctx, name)
        mine = claim_object.Claims(holders=(claim_object.Holder.of_deletion(claims.now()),))
        with ignoring(errno.EDQUOT, errno.ENOSPC):
            if claim_object.swap(ioctx, name, _unclaimed(ioctx, name), mine) is None:
                raise StillAttached(name, "an image that somebody takes at this moment")
    except StillAttached:
        forget_deletion(ioctx, name)
        raise
    yield
    forget_deletion(ioctx, name)


def forget_deletion(ioctx: Ioctx, name: str) -> None:
    """End the controller's claim: the image is gone, or stays. Absent is a success."""

    def without(now: claim_object.Claims) -> claim_object.Claims:
        return replace(now, holders=tuple(each for each in now.holders if not each.is_deletion))

    claim_object.changed(ioctx, name, without)


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
