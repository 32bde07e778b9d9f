"""Who has an image open, and whether a change of it would harm them.

A snapshot, a growth and a removal need librbd's exclusive lock, or ask its owner for it. An owner that does not
answer is treated as dead after 30 s, its lock is broken and its client blocklisted: a virtual machine that was only
paused (suspended, migrated, stopped in a debugger) would lose its disk because of a snapshot. So whoever watches the
image is asked first, by an empty notification, which every client of RBD acknowledges, and a silent one is a refusal.
A lock whose owner does not even watch any more is left alone as long as a sandbox has a claim on the image
(`crust.ceph.claims`); without one nobody uses the image, and librbd may break it.
"""

from crust import errors
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import binding, claim_object, own_clients
from crust.ceph.binding import Image, Ioctx

_ANSWERS_WITHIN_MS = 3000


class RbdClientSilent(errors.NotReady):
    """A client that has an image open does not answer, and a change of the image would cut it off."""

    def __init__(self, image: str, addresses: tuple[str, ...]) -> None:
        shown = ", ".join(addresses) or "unknown"
        super().__init__(
            f"{image} is not changed now",
            why=f"the client that has it open does not answer: {shown}; it would be treated as dead and cut off",
            hint="resume its virtual machine, or stop the pod; if its node is gone for good, `crust ceph fence`",
        )
        self.addresses = addresses


def watchers(image: Image) -> tuple[str, ...]:
    """The addresses of the clients that have the image open for writing."""
    return tuple(sorted(str(each["addr"]) for each in image.watchers_list()))


def check_unused(place: Place, ioctx: Ioctx, name: str) -> None:
    """Raise `StillAttached` while a client has the image open, or a sandbox has a claim on it."""
    claims = claim_object.read(ioctx, name).claims
    with place.image(ioctx, name) as image:
        found = own_clients.strangers(
            ioctx, name, lambda: frozenset(watchers(image)).difference(claims.ended)
        )
    if found:
        raise StillAttached(name, f"an image that {', '.join(sorted(found))} has open")
    for holder in claims.holders:
        raise StillAttached(
            name, f"an image that the sandbox {holder.sandbox} on {holder.node} has claimed"
        )


def check_answers(place: Place, ioctx: Ioctx, name: str) -> None:
    """Raise `RbdClientSilent` if a change would cut a client off."""
    with place.image(ioctx, name) as image:
        found, header = watchers(image), f"rbd_header.{image.id()}"
        owners = lock_owners(image)
    if found and not _answer(ioctx, header):
        raise RbdClientSilent(name, found)
    gone = tuple(each for each in owners if each not in found)
    if gone and claim_object.read(ioctx, name).claims.holders:
        raise RbdClientSilent(name, gone)


def lock_owners(image: Image) -> tuple[str, ...]:
    """The addresses of the clients that have librbd's own lock."""
    found = image.list_lockers()  # of a free lock it is an empty list
    return tuple(str(each[2]) for each in found["lockers"]) if isinstance(found, dict) else ()


def _answer(ioctx: Ioctx, header: str) -> bool:
    """Whether all clients acknowledge a notification, which to them says that the header may have changed."""
    try:
        return bool(ioctx.notify(header, "", _ANSWERS_WITHIN_MS))
    except binding.load().rados.TimedOut:
        return False
