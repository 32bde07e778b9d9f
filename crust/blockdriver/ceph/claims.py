"""One writer of an image in the whole cluster: take an image, record the client that opened it, give it back.

    take      before the hypervisor opens the image: no other holder has it, and no unknown client watches it; the
              active controller's client is known (`controller_lock`)
    record    after that, and before the guest gets the disk: the address of the client that has opened it now
    give_back when the hypervisor has closed the image, or has ended

A node's own kernel takes an image in the same steps (`HostClaim`): it is the client.

A later cut-off needs the address, and the cluster forgets a client that has been silent for 30 s. So the address is
recorded before the first write can come. A process that dies between two steps leaves a claim that names its host.
The same host ends the claim: a runtime that holds the volume's claim lock knows that no other virtual machine there
has the volume, and a boot has ended the kernel's mappings. Another host never ends it: it is refused with the
holder's name, and `fencing` is the way.

After the end of a process its writes may still arrive. A claim whose client has closed the image is free at once. Any
other claim has *ended*, and the image is free when its client is cut off (`fencing`).

A node's user needs the capabilities mon 'allow r' and osd 'profile rbd', and no right to blocklist. All functions
block.
"""

import datetime
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crust.blockdriver.ceph import binding, claim_object
from crust.blockdriver.ceph.claim_object import Claims, Holder, Mode, changed
from crust.blockdriver.ceph.cluster_image import ClusterImage
from crust.blockdriver.ceph.fencing import ImageNotCutOff, cut_off, with_ended
from crust.core import errors
from crust.host.process import syscalls

MACHINE_ID = "/etc/machine-id"


class ImageClaimed(errors.NotReady):
    def __init__(self, image: str, holder: Holder, host: "Host") -> None:
        why = f"{holder.shown} has it since {holder.claimed_at}"
        if holder.machine == host.machine and host.machine:
            why += (
                f"; {holder.node} has this host's machine id: either it is this host, and its runtime has another "
                "node name than its driver, or two hosts have one /etc/machine-id"
            )
        super().__init__(f"the image {image} cannot be used on {host.node}", why=why)


class ImageClaimLost(errors.NotReady):
    def __init__(self, image: str) -> None:
        super().__init__(
            f"this sandbox has lost its claim on the image {image}",
            why="it was cut off, because its node was treated as gone",
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its node name, and its machine id, which distinguishes two hosts with one name; empty if unknown."""

    node: str
    machine: str

    @classmethod
    def this(cls, node: str = "") -> "Host":
        """This host, by `node` or its host name."""
        with syscalls.translating(f"cannot read {MACHINE_ID}"):
            try:
                machine = Path(MACHINE_ID).read_text(encoding="ascii").strip()
            except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
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
    """Take an image for a sandbox, whose claim on the volume this host holds; a repeated call gives the same claim.

    `holder_id` is unique to the virtual machine, also among those of one sandbox. Raises HostNotIdentified,
    `ImageClaimed`, ImageBeingOpened, ImageWatched, and the errors of `fencing.cut_off` and of the binding.
    """
    return _taken(image, mode, host, Holder(holder_id, host.node, host.machine, sandbox, now()))


@dataclass(frozen=True, slots=True)
class HostClaim:
    """A node's own claim on an image that its kernel maps: one holder per node and boot, so that a restarted driver
    finds it again. A boot of the host has ended its earlier claims.
    """

    image: ClusterImage
    host: Host

    @property
    def _me(self) -> Holder:
        return Holder.of_host(self.host.node, self.host.machine, syscalls.boot_id(), now())

    def held(self) -> Holder | None:
        """The claim, if it exists and nobody has cut it off."""
        return _held(claim_object.read(self.image.ioctx, self.image.name).claims, self._me.id)

    def take(self, mode: Mode, address: str) -> None:
        """Take the image; `address` is the client of an existing mapping, or empty. Raises as `claims.take`."""
        _taken(self.image, mode, self.host, replace(self._me, address=address))

    def record(self, address: str) -> None:
        """Record the kernel's client from sysfs. Raises `ImageClaimLost`: then the image must be unmapped."""
        _record(self.image, self._me.id, address)

    def give_back(self) -> None:
        """End the claim: the image is not mapped. Absent is a success."""
        give_back(self.image, self._me.id)

    def end_earlier_boots(self) -> None:
        """End the claims that this host's kernel had before its last boot."""
        host, me = self.host, self._me
        _ended(
            self.image,
            lambda other: (
                other.is_host and other.id != me.id and other.is_on(host.node, host.machine)
            ),
        )


def _taken(image: ClusterImage, mode: Mode, host: Host, me: Holder) -> Holder:
    """The holder's claim: `me`, or an earlier attempt of the same virtual machine, which may have it open."""
    host.check_identified()
    before = changed(image.ioctx, image.name, lambda old: _without_left(old, me, mode, image, host))
    if before.ended and not _is_attempted(before, me):
        cut_off(image)
    after = changed(image.ioctx, image.name, lambda old: _with(old, me, mode, image.name, host))
    claim = of(after, me.id, image.name)
    if me.address or claim != me:
        return claim
    try:
        claims = claim_object.read(image.ioctx, image.name).claims
        # the addresses of several readers are not recorded: they can do no harm
        if claims.mode is not Mode.READERS or len(claims.holders) == 1:
            unknown = image.strangers(frozenset(holder.address for holder in claims.holders))
            if unknown:
                raise errors.NotReady.named(
                    "ImageWatched",
                    f"the image {image.name} cannot be used",
                    why=f"a client that crust does not know has it open: {', '.join(sorted(unknown))}",
                )
    except BaseException:
        give_back(image, me.id)
        raise
    return me


def _is_attempted(claims: Claims, me: Holder) -> bool:
    """Whether the same virtual machine has the claim already."""
    return not me.is_host and _held(claims, me.id) is not None


def _without_left(old: Claims, me: Holder, mode: Mode, image: ClusterImage, host: Host) -> Claims:
    """The claims without the holders of this host that `me` proves to have ended, of its own kind: virtual machines,
    because `me` has the volume's claim lock, or mappings of the kernel, of an earlier boot or by another client.
    """
    if _is_attempted(old, me):
        return old
    dead: tuple[Holder, ...] = ()
    if me.is_host or not old.mode is mode is Mode.READERS:  # readers share the lock
        on_host = (holder for holder in old.holders if holder.is_on(me.node, me.machine))
        ours = (holder for holder in on_host if holder.is_host == me.is_host)
        known = ("", me.address)
        dead = tuple(holder for holder in ours if holder.id != me.id or holder.address not in known)
    check_no_other(_without(old, (me, *dead)), mode, image.name, host)
    return end(old, dead, image)


def _with(claims: Claims, me: Holder, mode: Mode, image: str, host: Host) -> Claims:
    if _is_attempted(claims, me):
        return claims
    if claims.ended:
        raise ImageNotCutOff(image, claims.ended)
    others = _without(claims, (me,))
    check_no_other(others, mode, image, host)
    return Claims(mode, (*others.holders, me))


def _without(claims: Claims, holders: tuple[Holder, ...]) -> Claims:
    ids = {holder.id for holder in holders}
    others = tuple(holder for holder in claims.holders if holder.id not in ids)
    return replace(claims, holders=others)


def record(image: ClusterImage, holder_id: str) -> str:
    """Record the client that has opened the image for the holder; returns its address.

    Raises `ImageClaimLost`: then the image must be closed again. Raises ImageNotOpened.
    """
    claims = claim_object.read(image.ioctx, image.name).claims
    of(claims, holder_id, image.name)
    others = (*claims.ended, *(holder for holder in claims.holders if holder.id != holder_id))
    new = image.strangers(frozenset(holder.address for holder in others))
    if len(new) != 1:
        raise errors.RuntimeFailed.named(
            "ImageNotOpened",
            f"the client that has opened the image {image.name} is not known",
            why=f"{len(new)} new clients watch it, and it must be one",
        )
    [address] = new
    _record(image, holder_id, address)
    return address


def _record(image: ClusterImage, holder_id: str, address: str) -> None:
    def recorded(claims: Claims) -> Claims:
        holder = of(claims, holder_id, image.name)
        others = _without(claims, (holder,)).holders
        return replace(claims, holders=(*others, replace(holder, address=address)))

    changed(image.ioctx, image.name, recorded)


def give_back(image: ClusterImage, holder_id: str) -> None:
    """End a holder's claim: its hypervisor has closed the image, or has ended. Absent is a success."""
    _ended(image, lambda holder: holder.id == holder_id)


def _ended(image: ClusterImage, has_ended: Callable[[Holder], bool]) -> None:
    """End claims, and cut off clients that have not closed the image; without that right the controller does it."""
    after = changed(
        image.ioctx,
        image.name,
        lambda claims: end(claims, tuple(filter(has_ended, claims.holders)), image),
    )
    if after.ended:
        with suppress(ImageNotCutOff):
            cut_off(image)


def end(claims: Claims, holders: tuple[Holder, ...], image: ClusterImage) -> Claims:
    """The claims after the end of these holders' processes. A client that closed the image, or only read, goes."""
    addresses = frozenset(holder.address for holder in holders if holder.address)
    unclosed = frozenset[str]() if claims.mode is Mode.READERS else image.not_closed(addresses)
    ended = with_ended(claims, tuple(holder for holder in holders if holder.address in unclosed))
    return _without(ended, holders)


def check_claimable(ioctx: binding.Ioctx, image: str, mode: Mode, host: Host) -> None:
    """Raise as `take` if no sandbox on that host could take the image now.

    It is the driver's early answer, by the identity of a claim: node name and machine id. The runtime decides, in
    `take`.
    """
    host.check_identified()
    claims = claim_object.read(ioctx, image).claims
    for holder in claims.holders:
        if not holder.is_on(host.node, host.machine) and not share(claims.mode, mode):
            raise ImageClaimed(image, holder, host)


def check_no_other(claims: Claims, mode: Mode, image: str, host: Host) -> None:
    """Raise unless one more holder may have the image."""
    for holder in claims.holders:
        if not share(claims.mode, mode):
            raise ImageClaimed(image, holder, host)
        if not holder.address and mode is not Mode.READERS:
            raise errors.NotReady.named(
                "ImageBeingOpened",
                f"the image {image} cannot be shared yet",
                why=f"{holder.shown} has taken it at {holder.claimed_at} and not opened "
                "it: if two open it at once, nobody can assign their clients",
            )


def share(first: Mode, second: Mode) -> bool:
    """Whether holders with these modes may have one image."""
    return first is second and first is not Mode.WRITER


def of(claims: Claims, holder_id: str, image: str) -> Holder:
    """The holder's claim. Raises `ImageClaimLost`."""
    holder = _held(claims, holder_id)
    if holder is None:
        raise ImageClaimLost(image)
    return holder


def _held(claims: Claims, holder_id: str) -> Holder | None:
    return next((holder for holder in claims.holders if holder.id == holder_id), None)


def now() -> str:
    """The time of a claim, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
