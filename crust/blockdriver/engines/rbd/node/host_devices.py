"""A volume's image as a block device of this host, by the kernel's client of RBD (`krbd`), and the claim for it.

Attaching:  1. the claim (`HostClaim`): nobody else has the image
            2. map
            3. the address of the kernel's client into the claim; only then is the device given out
Detaching:  unmap, then give the claim back.

A crash between any two is completed by the same call: the claim is this boot's, and the kernel knows what is mapped.
A mapping whose client the claim does not name was cut off, or its claim is gone: it is unmapped, never used again.
"""

import json
from contextlib import suppress
from dataclasses import dataclass

from crust.blockdriver.engines.pool_access import Access, Attachment, NoHostDevice
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import claims
from crust.ceph.claim_object import Mode
from crust.ceph.claims import HostClaim
from crust.core import errors, volumes
from crust.core.volumes import NetworkImage
from crust.host.block import krbd
from crust.host.block.holders import DeviceInUse
from crust.host.block.krbd import KernelRbd, Login, Mapping


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The images that this host's kernel maps."""

    host: claims.Host
    kernel: KernelRbd = krbd.THIS_HOST

    def attach(
        self, place: Place, volume_id: volumes.VolumeId, mode: Mode, access: Access
    ) -> Attachment:
        """Raises `NoHostDevice`, KernelLacksFeatures, `krbd.KernelRefusesImage`, and what a claim raises."""
        if why := self.kernel.obstacle():
            raise NoHostDevice(why)
        image = place.network_image(volume_id)
        with place.ioctx(f"cannot map the image of {volume_id}") as ioctx:
            with place.image(ioctx, volume_id) as there:
                missing = self.kernel.unsupported(there.features())
            if missing:
                raise errors.NotReady.named(
                    "KernelLacksFeatures",
                    f"the image {volume_id} cannot be used on this host",
                    why=f"its kernel does not know these features of it: {', '.join(missing)}",
                    hint="`rbd feature disable` them, or publish the volume with deferral",
                )
            claim = HostClaim(place.claimed(ioctx, volume_id), self.host)
            mapping = self._usable(image, claim, readonly=access.readonly)
            claim.take(mode, mapping.address if mapping else "")
            if mapping is None:
                mapping = self._map(place, image, claim, readonly=access.readonly)
            try:
                claim.record(mapping.address)
            except claims.ImageClaimLost:
                self.kernel.unmap(mapping)
                raise
        return self._attachment(mapping)

    def attached(self, image: NetworkImage) -> Attachment | None:
        """The device of the image, if it is mapped."""
        mapping = self.kernel.find(image)
        return None if mapping is None else self._attachment(mapping)

    def refresh(self, image: NetworkImage, size_bytes: int) -> Attachment | None:
        """Give the device the image's size."""
        mapping = self.kernel.find(image)
        if mapping is None:
            return None
        found = self._attachment(mapping)
        if found.size_bytes != size_bytes:
            self.kernel.refresh(mapping)
            found = self._attachment(mapping)
        return found

    def unmap(self, image: NetworkImage) -> None:
        """Unmap the image; one that is not mapped is a success. Raises `StillAttached`."""
        mapping = self.kernel.find(image)
        if mapping is None:
            return
        try:
            self.kernel.unmap(mapping)
        except DeviceInUse as err:
            raise StillAttached(image.image, f"{err.path}: {err.why}") from err

    def _usable(self, image: NetworkImage, claim: HostClaim, *, readonly: bool) -> Mapping | None:
        """The mapping that there is; one that the claim does not name, or of another kind, is unmapped."""
        mapping = self.kernel.find(image)
        if mapping is None:
            return None
        held = claim.held()
        is_named = held is not None and held.address in ("", mapping.address)
        if is_named and mapping.is_readonly == readonly:
            return mapping
        self.unmap(image)
        return None

    def _map(
        self, place: Place, image: NetworkImage, claim: HostClaim, *, readonly: bool
    ) -> Mapping:
        try:
            return self.kernel.map(image, _login(place), readonly=readonly)
        except BaseException:
            if self.kernel.find(image) is None:
                # a claim that stays is this host's, for the next attempt
                with suppress(errors.CrustError):
                    claim.give_back()
            raise

    def _attachment(self, mapping: Mapping) -> Attachment:
        return Attachment(self.kernel.device(mapping), self.kernel.size_bytes(mapping))


def _login(place: Place) -> Login:
    """By the addresses that the monitors have: the kernel knows neither names nor two protocols at once."""
    who = place.connection.ceph_user
    found = json.loads(place.connection.command("mon dump"))["mons"]
    by_type = [
        {each["type"]: each["addr"] for each in mon["public_addrs"]["addrvec"]} for mon in found
    ]
    if all("v2" in each for each in by_type):
        return Login([each["v2"] for each in by_type], "prefer-crc", who.user, who.key)
    return Login([each["v1"] for each in by_type if "v1" in each], "legacy", who.user, who.key)
