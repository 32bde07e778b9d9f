"""A node's own claim on an image, for the device that its kernel maps: as `claims`, with the kernel as the client.

    take      before the image is mapped. One holder per node and boot: a driver that was killed finds it again
    record    after that, and before the device is given out: the address of the kernel's client, as sysfs has it
    give_back when the image is unmapped (`claims.give_back`)
    end_earlier_boots   at the first key after a boot, and at an unstage of what is not attached

A claim of an earlier boot of this host has ended with it: node name and machine id must be equal, and known. It is
free as that of a virtual machine that has ended. A claim of a virtual machine of this host is another's: only its
runtime knows whether that has ended.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from crust.ceph import claim_object, claims
from crust.ceph.claim_object import Claims, Holder, Mode, changed
from crust.ceph.claims import Host
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.fencing import ImageNotCutOff, cut_off
from crust.host.process import sysfs


@dataclass(frozen=True, slots=True)
class HostClaim:
    """This host's claim on one image."""

    image: ClusterImage
    host: Host

    def held(self) -> Holder | None:
        """The claim, if it is there and nobody has cut it off."""
        found = claim_object.read(self.image.ioctx, self.image.name).claims
        return next((each for each in found.holders if each.id == self._me.id), None)

    def take(self, mode: Mode, address: str) -> None:
        """Take the image; `address` is that of the mapping that there is already, empty if there is none.

        Raises as `claims.take`.
        """
        self.host.check_identified()
        me, image = replace(self._me, address=address), self.image
        if changed(image.ioctx, image.name, lambda now: self._left_ended(now, me)).ended:
            cut_off(image)
        changed(image.ioctx, image.name, lambda now: self._with(now, me, mode))
        if address:
            return
        try:
            claims.check_watchers(image)
        except BaseException:
            self.give_back()
            raise

    def record(self, address: str) -> None:
        """Record the kernel's client. Raises `claims.ImageClaimLost`: then the image must be unmapped again."""
        claims.record_address(self.image.ioctx, self.image.name, self._me.id, address)

    def give_back(self) -> None:
        """End the claim: the image is not mapped. Absent is a success."""
        claims.give_back(self.image, self._me.id)

    def end_earlier_boots(self) -> None:
        """End what this host's kernel had before its last boot. This user cuts its client off, if it may, or the
        controller does.
        """
        image = self.image

        def without(now: Claims) -> Claims:
            return claims.end(now, self._of_earlier_boots(now), image)

        if changed(image.ioctx, image.name, without).ended:
            with suppress(ImageNotCutOff):
                cut_off(image)

    @property
    def _me(self) -> Holder:
        return Holder.of_host(self.host.node, self.host.machine, sysfs.boot_id(), claims.now())

    def _of_earlier_boots(self, now: Claims) -> tuple[Holder, ...]:
        here, me = self.host, self._me
        kernels = (each for each in now.holders if each.is_host and each.id != me.id)
        return tuple(each for each in kernels if each.is_on(here.node, here.machine))

    def _left_ended(self, now: Claims, me: Holder) -> Claims:
        """Without what this host's kernel had before its last boot, or by a mapping that is gone."""
        mine = (each for each in now.holders if each.id == me.id)
        gone = (each for each in mine if each.address not in ("", me.address))
        return claims.end(now, (*self._of_earlier_boots(now), *gone), self.image)

    def _with(self, now: Claims, me: Holder, mode: Mode) -> Claims:
        others = replace(now, holders=tuple(each for each in now.holders if each.id != me.id))
        claims.check_no_other(others, mode, self.image.name, self.host)
        return Claims(mode, (*others.holders, me))
