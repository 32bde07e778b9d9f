"""One writer of an image in the whole cluster: taking an image, recording who opened it, giving it back.

    take      before the hypervisor opens the image: nobody else has it, and nobody unknown watches it; clients of
              crust itself are known (`own_clients`)
    record    after that, and before the guest gets the disk: the address of the client that has opened it now
    give_back when the hypervisor has closed the image, or has ended; unless it is being fenced

The address is what can be cut off later, and a client that has been silent for 30 s is listed nowhere any more. So it
is recorded before the first write can come. A process that dies between two steps leaves a claim that names its host:
the same host takes it over, because a runtime that holds the volume's claim lock knows that no other virtual machine
there has the volume. Another host never does: it is refused with the holder's name, and `fencing` is the way.

A node's user needs the capabilities mon 'allow r' and osd 'profile rbd', and no right to blocklist. Everything here
blocks.
"""

import datetime
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from crust import errors
from crust.ceph import claim_object, own_clients
from crust.ceph.binding import Image, Ioctx, load
from crust.ceph.claim_object import Claims, Holder, Mode, Read

MACHINE_ID = "/etc/machine-id"
_TRIES = 20
"""Of one change, where other writers are always first: more means that something is wrong."""


class ImageClaimed(errors.NotReady):
    """Another sandbox, or a node itself, has the image."""

    def __init__(self, image: str, holder: Holder, host: "Host") -> None:
        why = f"{holder.shown} has it since {holder.claimed_at}"
        if holder.machine == host.machine and host.machine:
            why += (
                f"; {holder.node} has this host's machine id: either it is this host, and its runtime has another "
                "node name than its driver, or two hosts have one /etc/machine-id"
            )
        super().__init__(
            f"the image {image} cannot be used on {host.node}",
            why=why,
            hint="stop the pod there; if the node is gone for good, cut it off: `crust ceph fence`",
        )
        self.holder = holder


class ImageBeingOpened(errors.NotReady):
    """A writer that the image is shared with is about to open it."""

    def __init__(self, image: str, holder: Holder) -> None:
        super().__init__(
            f"the image {image} cannot be shared yet",
            why=f"{holder.shown} has taken it at {holder.claimed_at} and not opened "
            "it: of two that open it at once nobody could tell which client is whose",
            hint="retry; if it stays so, start the pod there again, or cut that node off: `crust ceph fence`",
        )
        self.holder = holder


class ImageBeingFenced(errors.NotReady):
    """Somebody is cutting off the holders of the image."""

    def __init__(self, image: str) -> None:
        super().__init__(
            f"the image {image} cannot be used yet",
            why="its holders are being cut off from the cluster, or that was interrupted",
            hint="retry; if it stays so, repeat the `crust ceph fence` that began it",
        )


class ImageWatched(errors.NotReady):
    """A client that no claim knows has the image open."""

    def __init__(self, image: str, addresses: tuple[str, ...]) -> None:
        super().__init__(
            f"the image {image} cannot be used",
            why=f"a client that crust does not know has it open: {', '.join(addresses)}",
            hint="find it by `rbd status`; the cluster forgets one that has ended after 30 s",
        )
        self.addresses = addresses


class ImageClaimLost(errors.NotReady):
    """The holder's claim on the image was removed: it was cut off."""

    def __init__(self, image: str) -> None:
        super().__init__(
            f"the claim on the image {image} is not this sandbox's any more",
            why="it was cut off, because its node was treated as gone",
            hint="close the image without writing, and start the pod again",
        )


class ImageNotOpened(errors.RuntimeFailed):
    """The client that opened the image cannot be told from the others, or did not open it."""

    def __init__(self, image: str, found: int) -> None:
        super().__init__(
            f"the client that has opened the image {image} is not known",
            why=f"{found} new clients watch it, and it must be one",
            hint="close the image and take it again",
        )


class HostNotIdentified(errors.NotReady):
    """This host has no machine id, so that it cannot be told from another host with its node name."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"network images cannot be used on {node}",
            why=f"{MACHINE_ID} is absent, empty or not 32 hexadecimal digits here: two hosts of one node name would "
            "be taken for one, and both would write",
            hint=f"in a container, mount the host's {MACHINE_ID} read-only at the same path; on a host, run "
            "`systemd-machine-id-setup`",
        )


@dataclass(frozen=True, slots=True)
class Host:
    """This host: its node name, and its machine id, which tells two hosts with one name apart; empty if unknown."""

    node: str
    machine: str

    @classmethod
    def this(cls, node: str = "") -> "Host":
        """This host; by its host name if it has no other."""
        try:
            machine = Path(MACHINE_ID).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            machine = ""
        if not re.fullmatch(
            "[0-9a-f]{32}", machine
        ):  # systemd writes "uninitialized" before a first boot
            machine = ""
        return cls(node or socket.gethostname(), machine)

    def check_identified(self) -> None:
        """Raise `HostNotIdentified` for a host without a known machine id."""
        if not self.machine:
            raise HostNotIdentified(self.node)


def take(ioctx: Ioctx, image: str, mode: Mode, host: Host, sandbox: str, holder_id: str) -> Holder:
    """Take an image for a sandbox, whose claim on the volume this host holds; the same again is the same claim.

    `holder_id` is unique to the virtual machine: another one of the same sandbox has another. Raises
    `HostNotIdentified`, `ImageClaimed`, `ImageBeingOpened`, `ImageBeingFenced`, `ImageWatched`,
    `claim_object.UnreadableImageClaim`, and the binding's own errors.
    """
    host.check_identified()
    holder = Holder(holder_id, host.node, host.machine, sandbox, now())
    after = changed(ioctx, image, lambda claims: _with(claims, holder, mode, image, host)).claims
    mine = of(after, holder_id, image)
    if mine != holder:  # an earlier attempt of this virtual machine, which may have the image open
        return mine
    try:
        check_watchers(ioctx, image)
    except BaseException:
        give_back(ioctx, image, holder.id)
        raise
    return holder


def record(ioctx: Ioctx, image: str, holder_id: str) -> str:
    """Record the client that has opened the image for the holder; returns its address.

    Raises `ImageClaimLost`: then the image must be closed again. Raises `ImageNotOpened`.
    """
    claims = claim_object.read(ioctx, image).claims
    of(claims, holder_id, image)
    known = {*claims.ended, *(each.address for each in claims.holders if each.id != holder_id)}
    with opened(ioctx, image, read_only=True) as there:
        new = own_clients.unknown_clients(ioctx, image, lambda: watchers(there) - known)
    if len(new) != 1:
        raise ImageNotOpened(image, len(new))
    [address] = new

    record_address(ioctx, image, holder_id, address)
    return address


def record_address(ioctx: Ioctx, image: str, holder_id: str, address: str) -> None:
    """Record the holder's client, which the caller knows. Raises `ImageClaimLost`."""

    def recorded(now: Claims) -> Claims:
        mine = of(now, holder_id, image)
        others = tuple(each for each in now.holders if each != mine)
        return replace(now, holders=(*others, replace(mine, address=address)))

    changed(ioctx, image, recorded)


def give_back(ioctx: Ioctx, image: str, holder_id: str) -> None:
    """End a holder's claim: its hypervisor has closed the image, or has ended. Absent is a success.

    A client that ended without closing it is watched for 30 s more; it is remembered, so that the next holder need
    not wait for that.
    """

    def without(claims: Claims) -> Claims | None:
        mine = next((each for each in claims.holders if each.id == holder_id), None)
        if mine is None or claims.fencing == mine.node:
            return claims
        left = tuple(each for each in claims.holders if each != mine)
        ended = _lingering(ioctx, image, (*claims.ended, mine.address))
        return replace(claims, holders=left, ended=ended) if left or ended else None

    changed(ioctx, image, without)


def check_claimable(ioctx: Ioctx, image: str, mode: Mode, host: Host) -> None:
    """Raise what `take` would if no sandbox on that host could take the image now.

    It is the driver's early answer, by the identity that a claim has: node name and machine id. The runtime decides,
    in `take`.
    """
    host.check_identified()
    claims = claim_object.read(ioctx, image).claims
    if claims.fencing:
        raise ImageBeingFenced(image)
    for each in claims.holders:
        if not each.is_on(host.node, host.machine) and not share(claims.mode, mode):
            raise ImageClaimed(image, each, host)


def changed(ioctx: Ioctx, image: str, change: Callable[[Claims], Claims | None]) -> Read:
    """Change the claims on an image; None removes the object. `change` is called again if another was first."""
    for _ in range(_TRIES):
        before = claim_object.read(ioctx, image)
        after = change(before.claims)
        if after == before.claims or (after is None and not before.cookie):
            return before
        found = claim_object.swap(ioctx, image, before, after)
        if found is not None:
            return found
    raise ImageBeingFenced(image)


@contextmanager
def opened(ioctx: Ioctx, image: str, *, read_only: bool) -> Iterator[Image]:
    """The image, open; a reader is no watcher."""
    made: Image = load().rbd.Image(ioctx, image, read_only=read_only)
    try:
        yield made
    finally:
        made.close()


def watchers(image: Image) -> frozenset[str]:
    """The addresses of the clients that have the image open for writing."""
    return frozenset(str(each["addr"]) for each in image.watchers_list())


def _with(claims: Claims, holder: Holder, mode: Mode, image: str, host: Host) -> Claims:
    if claims.fencing:
        raise ImageBeingFenced(image)
    here = [
        each
        for each in claims.holders
        if each.is_on(host.node, host.machine) and not each.is_host  # its kernel uses the image
    ]
    if any(each.id == holder.id for each in here):
        return claims
    if claims.mode is mode is Mode.READERS:
        return replace(claims, holders=(*claims.holders, holder))
    elsewhere = tuple(each for each in claims.holders if each not in here)
    for each in elsewhere:
        if not share(claims.mode, mode):
            raise ImageClaimed(image, each, host)
        if not each.address:
            raise ImageBeingOpened(image, each)
    # left by virtual machines of this host: this one has the volume's claim lock, so they have ended
    ended = (*claims.ended, *(each.address for each in here if each.address))
    return Claims(mode, (*elsewhere, holder), ended=tuple(dict.fromkeys(ended)))


def share(one: Mode, other: Mode) -> bool:
    """Whether holders with these modes may have one image."""
    return one is other and one is not Mode.WRITER


def of(claims: Claims, holder_id: str, image: str) -> Holder:
    """The holder's claim. Raises `ImageClaimLost`."""
    mine = [each for each in claims.holders if each.id == holder_id]
    if not mine or claims.fencing == mine[0].node:
        raise ImageClaimLost(image)
    return mine[0]


def check_watchers(ioctx: Ioctx, image: str) -> None:
    """Raise `ImageWatched` for a client that no claim knows; break the lock of one that has ended.

    The next client cannot do that itself: it would have to wait for 30 s, and then need the right to blocklist.
    """
    claims = claim_object.read(ioctx, image).claims
    if claims.mode is Mode.READERS and len(claims.holders) > 1:
        return  # the addresses of readers are not recorded: they can do no harm
    known = {*claims.ended, *(each.address for each in claims.holders)}
    with opened(ioctx, image, read_only=True) as there:
        unknown = own_clients.unknown_clients(ioctx, image, lambda: watchers(there) - known)
        if unknown:
            raise ImageWatched(image, tuple(sorted(unknown)))
        held = lockers(there) & set(claims.ended)
    if held:
        break_locks(ioctx, image, held)


def lockers(image: Image) -> frozenset[str]:
    """The addresses of the clients that have librbd's own lock."""
    return frozenset(address for _, _, address in _lockers(image))


def _lockers(image: Image) -> list[tuple[str, str, str]]:
    found = image.list_lockers()  # of a free lock it is an empty list
    return list(found["lockers"]) if isinstance(found, dict) else []


def break_locks(ioctx: Ioctx, image: str, addresses: frozenset[str] | set[str]) -> None:
    """Take librbd's lock from clients that have ended or are blocklisted."""
    with opened(ioctx, image, read_only=False) as there:
        for client, cookie, address in _lockers(there):
            if address in addresses:
                there.break_lock(client, cookie)


def _lingering(ioctx: Ioctx, image: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the addresses that still watch the image, or still have its lock."""
    try:
        with opened(ioctx, image, read_only=True) as there:
            present = watchers(there) | lockers(there)
    except load().rbd.ImageNotFound:
        return ()
    return tuple(each for each in dict.fromkeys(addresses) if each in present)


def now() -> str:
    """The time of a claim, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
