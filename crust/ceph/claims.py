"""One writer of an image in the whole cluster: taking an image, recording who opened it, giving it back.

    take      before the hypervisor opens the image: nobody else has it, and nobody unknown watches it; the active
              controller's client is known (`controller_lock`)
    record    after that, and before the guest gets the disk: the address of the client that has opened it now
    give_back when the hypervisor has closed the image, or has ended

A node's own kernel takes an image in the same steps (`HostClaim`): it is the client.

The address is what can be cut off later, and a client that has been silent for 30 s is listed nowhere any more. So it
is recorded before the first write can come. A process that dies between two steps leaves a claim that names its host:
the same host ends it, because a runtime that holds the volume's claim lock knows that no other virtual machine there
has the volume, and what its kernel had mapped before a boot has ended, too. Another host never does: it is refused
with the holder's name, and `fencing` is the way.

That a process has ended does not mean that nothing of it will be written any more. A claim whose client has closed
the image is free at once. Any other has *ended*, and the image is free when its client is cut off (`fencing`).

A node's user needs the capabilities mon 'allow r' and osd 'profile rbd', and no right to blocklist. Everything here
blocks.
"""

import datetime
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crust.ceph import claim_object
from crust.ceph.binding import Ioctx
from crust.ceph.claim_object import Claims, Holder, Mode, changed
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.fencing import ImageNotCutOff, cut_off, with_ended
from crust.core import errors
from crust.host.process import syscalls

MACHINE_ID = "/etc/machine-id"


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


class ImageClaimLost(errors.NotReady):
    """The holder's claim on the image was removed: it was cut off."""

    def __init__(self, image: str) -> None:
        super().__init__(
            f"the claim on the image {image} is not this sandbox's any more",
            why="it was cut off, because its node was treated as gone",
            hint="close the image without writing, and start the pod again",
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
        # systemd writes "uninitialized" before a first boot
        if not re.fullmatch("[0-9a-f]{32}", machine):
            machine = ""
        return cls(node or socket.gethostname(), machine)

    def check_identified(self) -> None:
        """Raise HostNotIdentified for a host without a known machine id."""
        if not self.machine:
            raise errors.NotReady.named(
                "HostNotIdentified",
                f"network images cannot be used on {self.node}",
                why=f"{MACHINE_ID} is absent, empty or not 32 hexadecimal digits here: two hosts of one node name "
                "would be taken for one, and both would write",
                hint=f"in a container, mount the host's {MACHINE_ID} read-only at the same path; on a host, run "
                "`systemd-machine-id-setup`",
            )


def take(image: ClusterImage, mode: Mode, host: Host, sandbox: str, holder_id: str) -> Holder:
    """Take an image for a sandbox, whose claim on the volume this host holds; the same again is the same claim.

    `holder_id` is unique to the virtual machine: another one of the same sandbox has another. Raises
    HostNotIdentified, `ImageClaimed`, ImageBeingOpened, ImageWatched, what `fencing.cut_off` raises, and the
    binding's own errors.
    """
    return _taken(image, mode, host, Holder(holder_id, host.node, host.machine, sandbox, now()))


@dataclass(frozen=True, slots=True)
class HostClaim:
    """A node's own claim on an image that its kernel maps: one holder per node and boot, so that a driver that was
    killed finds it again. A claim of an earlier boot of this host has ended with it.
    """

    image: ClusterImage
    host: Host

    @property
    def _me(self) -> Holder:
        return Holder.of_host(self.host.node, self.host.machine, syscalls.boot_id(), now())

    def held(self) -> Holder | None:
        """The claim, if it is there and nobody has cut it off."""
        return _held(claim_object.read(self.image.ioctx, self.image.name).claims, self._me.id)

    def take(self, mode: Mode, address: str) -> None:
        """Take the image; `address` is that of the mapping that there is already, empty if there is none.

        Raises as `claims.take`.
        """
        _taken(self.image, mode, self.host, replace(self._me, address=address))

    def record(self, address: str) -> None:
        """Record the kernel's client, as sysfs has it. Raises `ImageClaimLost`: then the image must be unmapped."""
        _record(self.image, self._me.id, address)

    def give_back(self) -> None:
        """End the claim: the image is not mapped. Absent is a success."""
        give_back(self.image, self._me.id)

    def end_earlier_boots(self) -> None:
        """End the claims that this host's kernel had before its last boot."""
        here, me = self.host, self._me
        _ended(
            self.image,
            lambda each: each.is_host and each.id != me.id and each.is_on(here.node, here.machine),
        )


def _taken(image: ClusterImage, mode: Mode, host: Host, me: Holder) -> Holder:
    """The holder's claim: `me`, or that of an earlier attempt of the same virtual machine, which may have it open."""
    host.check_identified()
    found = changed(image.ioctx, image.name, lambda now: _without_left(now, me, mode, image, host))
    if found.ended and not _is_attempted(found, me):
        cut_off(image)
    after = changed(image.ioctx, image.name, lambda now: _with(now, me, mode, image.name, host))
    mine = of(after, me.id, image.name)
    if me.address or mine != me:
        return mine
    try:
        check_watchers(image)
    except BaseException:
        give_back(image, me.id)
        raise
    return me


def _is_attempted(now: Claims, me: Holder) -> bool:
    """Whether the same virtual machine has the claim already."""
    return not me.is_host and _held(now, me.id) is not None


def _without_left(now: Claims, me: Holder, mode: Mode, image: ClusterImage, host: Host) -> Claims:
    if _is_attempted(now, me):
        return now
    left = _left(now, me, mode)
    check_no_other(_without(now, (me, *left)), mode, image.name, host)
    return end(now, left, image)


def _with(now: Claims, me: Holder, mode: Mode, image: str, host: Host) -> Claims:
    if _is_attempted(now, me):
        return now
    if now.ended:
        raise ImageNotCutOff(image, now.ended)
    others = _without(now, (me,))
    check_no_other(others, mode, image, host)
    return Claims(mode, (*others.holders, me))


def _left(now: Claims, me: Holder, mode: Mode) -> tuple[Holder, ...]:
    """Those of this host that have ended, as `me` shows: virtual machines, because this one has the volume's claim
    lock, or what the kernel had mapped, before a boot or by another client. One kind says nothing of the other.
    """
    if not me.is_host and now.mode is mode is Mode.READERS:
        return ()  # they share the lock
    here = (holder for holder in now.holders if holder.is_on(me.node, me.machine))
    ours = (each for each in here if each.is_host == me.is_host)
    return tuple(each for each in ours if each.id != me.id or each.address not in ("", me.address))


def _without(now: Claims, holders: tuple[Holder, ...]) -> Claims:
    ids = {holder.id for holder in holders}
    return replace(now, holders=tuple(holder for holder in now.holders if holder.id not in ids))


def record(image: ClusterImage, holder_id: str) -> str:
    """Record the client that has opened the image for the holder; returns its address.

    Raises `ImageClaimLost`: then the image must be closed again. Raises ImageNotOpened.
    """
    claims = claim_object.read(image.ioctx, image.name).claims
    of(claims, holder_id, image.name)
    others = (*claims.ended, *(holder for holder in claims.holders if holder.id != holder_id))
    new = image.strangers(frozenset(other.address for other in others))
    if len(new) != 1:
        raise errors.RuntimeFailed.named(
            "ImageNotOpened",
            f"the client that has opened the image {image.name} is not known",
            why=f"{len(new)} new clients watch it, and it must be one",
            hint="close the image and take it again",
        )
    [address] = new
    _record(image, holder_id, address)
    return address


def _record(image: ClusterImage, holder_id: str, address: str) -> None:
    """Record the holder's client. Raises `ImageClaimLost`."""

    def recorded(now: Claims) -> Claims:
        mine = of(now, holder_id, image.name)
        others = _without(now, (mine,)).holders
        return replace(now, holders=(*others, replace(mine, address=address)))

    changed(image.ioctx, image.name, recorded)


def give_back(image: ClusterImage, holder_id: str) -> None:
    """End a holder's claim: its hypervisor has closed the image, or has ended. Absent is a success."""
    _ended(image, lambda each: each.id == holder_id)


def _ended(image: ClusterImage, has_ended: Callable[[Holder], bool]) -> None:
    """End claims. The image of a client that ended without closing it is free when the client is cut off: here, if
    this user may do so, else by the controller.
    """

    def without(now: Claims) -> Claims:
        return end(now, tuple(holder for holder in now.holders if has_ended(holder)), image)

    if changed(image.ioctx, image.name, without).ended:
        with suppress(ImageNotCutOff):
            cut_off(image)


def end(claims: Claims, holders: tuple[Holder, ...], image: ClusterImage) -> Claims:
    """The claims when these holders' processes have ended. One that has closed the image, or only read, is free."""
    addresses = frozenset(holder.address for holder in holders if holder.address)
    left = frozenset[str]() if claims.mode is Mode.READERS else image.not_closed(addresses)
    ended = with_ended(claims, tuple(holder for holder in holders if holder.address in left))
    return _without(ended, holders)


def check_claimable(ioctx: Ioctx, image: str, mode: Mode, host: Host) -> None:
    """Raise what `take` would if no sandbox on that host could take the image now.

    It is the driver's early answer, by the identity that a claim has: node name and machine id. The runtime decides,
    in `take`.
    """
    host.check_identified()
    claims = claim_object.read(ioctx, image).claims
    for holder in claims.holders:
        if not holder.is_on(host.node, host.machine) and not share(claims.mode, mode):
            raise ImageClaimed(image, holder, host)


def check_no_other(claims: Claims, mode: Mode, image: str, host: Host) -> None:
    """Raise unless one more holder may have the image beside those that have it."""
    for holder in claims.holders:
        if not share(claims.mode, mode):
            raise ImageClaimed(image, holder, host)
        if not holder.address and mode is not Mode.READERS:
            raise errors.NotReady.named(
                "ImageBeingOpened",
                f"the image {image} cannot be shared yet",
                why=f"{holder.shown} has taken it at {holder.claimed_at} and not opened "
                "it: of two that open it at once nobody could tell which client is whose",
                hint="retry; if it stays so, start the pod there again, or cut that node off: `crust ceph fence`",
            )


def share(one: Mode, other: Mode) -> bool:
    """Whether holders with these modes may have one image."""
    return one is other and one is not Mode.WRITER


def of(claims: Claims, holder_id: str, image: str) -> Holder:
    """The holder's claim. Raises `ImageClaimLost`."""
    mine = _held(claims, holder_id)
    if mine is None:
        raise ImageClaimLost(image)
    return mine


def _held(claims: Claims, holder_id: str) -> Holder | None:
    return next((holder for holder in claims.holders if holder.id == holder_id), None)


def check_watchers(image: ClusterImage) -> None:
    """Raise ImageWatched for a client that no claim knows."""
    claims = claim_object.read(image.ioctx, image.name).claims
    if claims.mode is Mode.READERS and len(claims.holders) > 1:
        return  # the addresses of readers are not recorded: they can do no harm
    unknown = image.strangers(frozenset(holder.address for holder in claims.holders))
    if unknown:
        raise errors.NotReady.named(
            "ImageWatched",
            f"the image {image.name} cannot be used",
            why=f"a client that crust does not know has it open: {', '.join(sorted(unknown))}",
            hint="find it by `rbd status`; the cluster forgets one that has ended after 30 s",
        )


def now() -> str:
    """The time of a claim, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
