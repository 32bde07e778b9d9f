"""A volume's image as a block device of this host, by the kernel's client of RBD (`krbd`), and the claim for it.

Attach:  1. take the claim (`HostClaim`): nobody else has the image
         2. map
         3. record the address of the kernel's client in the claim; only then is the device given out
Detach:  unmap, then give the claim back.

After a crash between two steps the same call completes them: the claim is this boot's, and the kernel lists its
mappings. A mapping whose client the claim does not name was cut off, or its claim is gone: it is unmapped.
"""

import json
import logging
from dataclasses import dataclass

from crust.blockdriver.ceph import claim_object, claims
from crust.blockdriver.engines.pool_access import Access, Attachment
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.host import krbd
from crust.core import errors, volumes
from crust.host.block.holders import DeviceInUse

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostDevices:
    host: claims.Host
    kernel: krbd.KernelRbd = krbd.THIS_HOST

    def attach(
        self, place: Namespace, volume_id: volumes.VolumeId, mode: claim_object.Mode, access: Access
    ) -> Attachment:
        """Where `KernelRbd.obstacle` is none. Raises KernelLacksFeatures, KernelRefusesImage, errors of a claim."""
        image = place.network_image(volume_id)
        with place.ioctx(f"cannot map the image of {volume_id}") as ioctx:
            with place.image(ioctx, volume_id) as opened:
                missing = self.kernel.unsupported(opened.features())
            if missing:
                raise errors.NotReady.named(
                    "KernelLacksFeatures",
                    f"the image {volume_id} cannot be used on this host",
                    why=f"its kernel does not know these features of it: {', '.join(missing)}",
                )
            claim = claims.HostClaim(place.claimed(ioctx, volume_id), self.host)
            mapping = self.kernel.find(image)
            if mapping is not None:
                holder = claim.held()
                is_named = holder is not None and holder.address in ("", mapping.address)
                if not is_named or mapping.is_readonly != access.readonly:
                    self.unmap(image)
                    mapping = None
            claim.take(mode, mapping.address if mapping else "")
            try:
                mapping = mapping or self.kernel.map(image, _login(place), readonly=access.readonly)
            except BaseException:
                if self.kernel.find(image) is None:
                    try:
                        claim.give_back()
                    except errors.CrustError as err:  # it is this host's, for the next attempt
                        _log.warning("a claim stays", extra={"image": str(image), "error": err})
                raise
            try:
                claim.record(mapping.address)
            except claims.ImageClaimLost:
                self.kernel.unmap(mapping)
                raise
        return self._attachment(mapping)

    def attached(self, image: volumes.NetworkImage) -> Attachment | None:
        mapping = self.kernel.find(image)
        return None if mapping is None else self._attachment(mapping)

    def refresh(self, image: volumes.NetworkImage, size_bytes: int) -> Attachment | None:
        mapping = self.kernel.find(image)
        if mapping is None:
            return None
        attachment = self._attachment(mapping)
        if attachment.size_bytes != size_bytes:
            self.kernel.refresh(mapping)
            attachment = self._attachment(mapping)
        return attachment

    def unmap(self, image: volumes.NetworkImage) -> None:
        """Unmap the image; an unmapped image is a success. Raises `StillAttached`."""
        mapping = self.kernel.find(image)
        if mapping is None:
            return
        try:
            self.kernel.unmap(mapping)
        except DeviceInUse as err:
            raise StillAttached(image.image, f"{err.path}: {err.why}") from err

    def _attachment(self, mapping: krbd.Mapping) -> Attachment:
        return Attachment(self.kernel.device(mapping), self.kernel.size_bytes(mapping))


def _login(place: Namespace) -> krbd.Login:
    """The login by the monitors' own addresses: the kernel takes neither names nor two protocols at once."""
    user = place.connection.ceph_user
    monitors = json.loads(place.connection.command("mon dump"))["mons"]
    vectors = [monitor["public_addrs"]["addrvec"] for monitor in monitors]
    by_type = [{address["type"]: address["addr"] for address in vector} for vector in vectors]
    if all("v2" in monitor for monitor in by_type):
        return krbd.Login([monitor["v2"] for monitor in by_type], "prefer-crc", user.user, user.key)
    v1 = [monitor["v1"] for monitor in by_type if "v1" in monitor]
    return krbd.Login(v1, "legacy", user.user, user.key)
