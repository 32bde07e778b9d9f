"""The clients that have an image open, and changes of the image that harm none of them.

A snapshot, a growth and most other changes need librbd's exclusive lock, or ask its owner for it. If the owner does
not answer for 30 s, librbd treats it as dead, breaks its lock and blocklists its client: a virtual machine that was
only paused (suspended, migrated, stopped in a debugger) would lose its disk because of a snapshot. No option of
librbd prevents that. Without the blocklisting (`rbd_blocklist_on_break_lock`) it is worse: a client that wakes up
without its lock writes beside the new owner, and about one of ten hangs for ever (librbd 16: it gives up the lock,
which waits for its flush, which waits for the new header, which waits for the flush).

So the driver ends a change before librbd breaks a lock (`changing`):

    before     it asks each client that watches the image, by an empty notification, which every client of RBD
               acknowledges, and refuses the change if one is silent. It does not touch a lock whose owner watches no
               more while a sandbox has a claim on the image; without a claim librbd may break it
    meanwhile  it asks them again, each `ASK_EVERY_S`; when one has been silent for `SILENT_S`, it blocklists its own
               client, which ends the change at any point: the OSDs refuse its next step
    after      if librbd might have broken a lock meanwhile, because this process slept or no monitor answered, the
               change does not count as done

The silent client still has its lock and has noticed nothing. It may do the requested change when it wakes up; a
repeated change looks first.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from crust.blockdriver.ceph import claim_object, claims, cluster_image, fencing
from crust.blockdriver.ceph.binding import Image, Ioctx, ignoring, load
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.core import errors

_ANSWERS_WITHIN_MS = 3000
ASK_EVERY_S = 3.0
_AGAIN_S = 0.5
SILENT_S = 8.0
"""Two questions in a row without an answer."""
KEPT_S = 20.0
"""A client that has answered watches the image for longer: its watch ends 30 s after its last sign of life, which it
gives every 5 s. Until then librbd does not break its lock."""

_log = logging.getLogger(__name__)


class RbdClientSilent(errors.NotReady):
    def __init__(self, image: str, addresses: tuple[str, ...]) -> None:
        super().__init__(
            f"{image} is not changed now",
            why=f"a client that has it open does not answer: {', '.join(addresses) or 'unknown'}; it would be "
            "treated as dead",
        )


def now_s() -> float:
    """The time since the boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def check_unused(place: Namespace, ioctx: Ioctx, name: str) -> None:
    """Raise `StillAttached` while a client has the image open, or a sandbox has a claim on it.

    Ended clients are cut off first: their late writes would go into a removed image.
    """
    image = place.claimed(ioctx, name)
    fencing.cut_off(image)
    if clients := image.strangers():
        raise StillAttached(name, f"an image that {', '.join(sorted(clients))} has open")
    _check_unclaimed(claim_object.read(ioctx, name).claims, name)


def _check_unclaimed(old: claim_object.Claims, name: str) -> None:
    """Raise `StillAttached` unless there are no claims, or only the claim of a deletion."""
    for holder in (*old.holders, *old.ended):
        if not holder.is_deletion:
            raise StillAttached(name, f"an image that {holder.shown} has claimed")


@contextmanager
def deleting(place: Namespace, ioctx: Ioctx, name: str) -> Iterator[None]:
    """Claim the image for the controller while the block removes it: nobody else takes it. Raises `StillAttached`.

    A block that fails leaves the controller's claim, and the next deletion goes on. In a full pool no object can be
    made: so nobody else can take an image without a claim object there.
    """

    def taken(old: claim_object.Claims) -> claim_object.Claims:
        _check_unclaimed(old, name)
        return claim_object.Claims(holders=(claim_object.Holder.of_deletion(claims.now()),))

    try:
        check_unused(place, ioctx, name)
        with ignoring(errno.EDQUOT, errno.ENOSPC):
            claim_object.changed(ioctx, name, taken)
    except StillAttached:
        forget_deletion(ioctx, name)
        raise
    yield
    forget_deletion(ioctx, name)


def forget_deletion(ioctx: Ioctx, name: str) -> None:
    """End the controller's claim: the image is gone, or stays. Absent is a success."""
    claim_object.changed(
        ioctx,
        name,
        lambda old: replace(
            old, holders=tuple(holder for holder in old.holders if not holder.is_deletion)
        ),
    )


def check_answers(place: Namespace, ioctx: Ioctx, name: str) -> "ClientsSeen":
    """Raise `RbdClientSilent` if a change would break the lock of a client; returns the clients that answered."""
    answered_s = now_s()
    with place.image(ioctx, name) as image:
        clients, header = tuple(sorted(cluster_image.watchers(image))), f"rbd_header.{image.id()}"
        owners = cluster_image.lockers(image)
    if clients and not answer(ioctx, header):
        raise RbdClientSilent(name, clients)
    absent = tuple(sorted(owners.difference(clients)))
    if absent and claim_object.read(ioctx, name).claims.holders:
        raise RbdClientSilent(name, absent)
    return ClientsSeen(ioctx, name, header, clients, answered_s)


def answer(ioctx: Ioctx, header: str) -> bool:
    """Whether all clients acknowledge a notification, which tells them that the header may have changed."""
    try:
        return bool(ioctx.notify(header, "", _ANSWERS_WITHIN_MS))
    except load().rados.TimedOut:
        return False


@contextmanager
def changing(place: Namespace, ioctx: Ioctx, name: str) -> Iterator[Image]:
    """The image, open for a change that is made inside the block.

    Raises `RbdClientSilent`, `rbd.ImageNotFound`. After an error the change may have been made.
    """
    seen = check_answers(place, ioctx, name)
    with place.connection.endable() as end:
        try:
            with seen.kept(end), place.image(ioctx, name, read_only=False) as image:
                yield image
        except (*load().failures, errors.CrustError) as err:
            if seen.is_ended:
                raise RbdClientSilent(name, seen.clients) from err
            raise
    if not seen.is_kept and seen.clients:
        raise RbdClientSilent(name, seen.clients)


@dataclass(slots=True)
class ClientsSeen:
    """The clients that had an image open and answered. `kept` asks them on a thread of its own during a change, and
    ends the change when one is silent.
    """

    ioctx: Ioctx
    image: str
    header: str
    """The object that they watch."""
    clients: tuple[str, ...]
    answered_s: float
    is_ended: bool = False
    is_kept: bool = True
    """No lock can have been broken so far."""
    _done: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def kept(self, end: Callable[[], str]) -> Iterator[None]:
        """`end` ends the change by blocklisting its client; it returns the client's address."""
        thread = threading.Thread(target=self._run, args=(end,), name="rbd-change", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            self.is_kept &= now_s() - self.answered_s <= KEPT_S

    def _run(self, end: Callable[[], str]) -> None:
        wait_s = ASK_EVERY_S
        while not self.is_ended and not self._done.wait(wait_s):
            at_s = now_s()
            try:
                is_answered = answer(self.ioctx, self.header)
            except load().failures:
                is_answered = False
            if is_answered:
                self.is_kept &= at_s - self.answered_s <= KEPT_S
                self.answered_s, wait_s = at_s, ASK_EVERY_S
                continue
            wait_s = _AGAIN_S
            if now_s() - self.answered_s < SILENT_S:
                continue
            extra: dict[str, object] = {"image": self.image, "clients": self.clients}
            try:
                extra["client"] = end()
            except errors.CrustError as err:
                text = "a client fell silent while its image was changed, and the change could not be ended yet"
                _log.warning(text, extra={**extra, "error": err})
            else:
                self.is_ended = True
                text = "a client fell silent while its image was changed: the change is ended, by a new connection"
                _log.warning(text, extra=extra)
