"""A node's own claim on an image, for the device that its kernel maps: as `claims`, with the kernel as the client.

    take      before the image is mapped. One holder per node and boot: a driver that was killed finds it again
    record    after that, and before the device is given out: the address of the kernel's client, as sysfs has it
    give_back when the image is unmapped (`claims.give_back`)

A claim of an earlier boot of this host has ended with it, and is taken over: node name and machine id must be equal,
and known. A claim of a virtual machine of this host is another's: only its runtime knows whether that has ended.
"""

from dataclasses import dataclass, replace

from crust.ceph import claim_object, claims
from crust.ceph.binding import Ioctx
from crust.ceph.claim_object import Claims, Holder, Mode
from crust.ceph.claims import Host, ImageBeingFenced, ImageBeingOpened, ImageClaimed
from crust.host.process import boot


@dataclass(frozen=True, slots=True)
class HostClaim:
    """This host's claim on one image."""

    ioctx: Ioctx
    image: str
    host: Host

    def held(self) -> Holder | None:
        """The claim, if it is there and nobody is cutting it off."""
        found = claim_object.read(self.ioctx, self.image).claims
        if found.fencing == self.host.node:
            return None
        return next((each for each in found.holders if each.id == self._me.id), None)

    def take(self, mode: Mode, address: str) -> None:
        """Take the image; `address` is that of the mapping that there is already, empty if there is none.

        Raises as `claims.take`.
        """

        def taken(now: Claims) -> Claims:
            return _with(now, replace(self._me, address=address), mode, self.image, self.host)

        self.host.check_identified()
        claims.changed(self.ioctx, self.image, taken)
        if address:
            return
        try:
            claims.check_watchers(self.ioctx, self.image)
        except BaseException:
            self.give_back()
            raise

    def record(self, address: str) -> None:
        """Record the kernel's client. Raises `claims.ImageClaimLost`: then the image must be unmapped again."""
        claims.record_address(self.ioctx, self.image, self._me.id, address)

    def give_back(self) -> None:
        """End the claim: the image is not mapped. Absent is a success."""
        claims.give_back(self.ioctx, self.image, self._me.id)

    @property
    def _me(self) -> Holder:
        return Holder.of_host(self.host.node, self.host.machine, boot.boot_id(), claims.now())


def _with(now: Claims, holder: Holder, mode: Mode, image: str, host: Host) -> Claims:
    if now.fencing:
        raise ImageBeingFenced(image)
    mine = [each for each in now.holders if each.id == holder.id or _has_ended(each, host)]
    others = tuple(each for each in now.holders if each not in mine)
    for each in others:
        if not claims.share(now.mode, mode):
            raise ImageClaimed(image, each, host)
        if not each.address and mode is not Mode.READERS:
            raise ImageBeingOpened(image, each)
    left = (each.address for each in mine if each.address not in ("", holder.address))
    return Claims(mode, (*others, holder), ended=tuple(dict.fromkeys((*now.ended, *left))))


def _has_ended(holder: Holder, host: Host) -> bool:
    """Whether it is this host's kernel before its last boot."""
    return holder.is_host and holder.is_on(host.node, host.machine)
