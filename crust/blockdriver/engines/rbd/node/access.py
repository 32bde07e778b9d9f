"""The node's side: the image's name for a hypervisor that opens it, or a device of this host (`host_devices`).

An attach for a hypervisor opens nothing. It checks that the image exists, and that no other node has it if the volume
may have one writer; the runtime's claim at the start of its virtual machine decides
(`crust.blockdriver.ceph.claims`). An attachment of this node is a note in the run directory, gone with the boot, like
everything that a hypervisor had open. The note has the image, without any key, so that a restarted node without a key
can unstage and count the volume (`volume_users`).

The kernel maps a volume that this host itself uses; its note is written before, and says so.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace

import pydantic

from crust.blockdriver.ceph import binding, claim_object, claims
from crust.blockdriver.engines import pool_access, protocol
from crust.blockdriver.engines.pool_access import READ_WRITE, Access, Attachment
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.node.host_devices import HostDevices
from crust.blockdriver.engines.rbd.node.volume_users import CephKeyNotGiven, Users
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.blockdriver.host import krbd
from crust.core import errors, volumes
from crust.host.files import durable, listing
from crust.host.process import syscalls

_MODES = {
    volumes.AccessMode.MULTI_NODE_READER_ONLY: claim_object.Mode.READERS,
    volumes.AccessMode.MULTI_NODE_MULTI_WRITER: claim_object.Mode.SHARED,
}
"""The other modes have one writer, or readers of one node: a stage treats them as one holder's host."""
_NOTE_BYTES = 64 * 1024
_NO_KEY = (CephKeyNotGiven, binding.CephKeyRefused, binding.CephNotPermitted)
_log = logging.getLogger(__name__)


class _Note(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    image: volumes.NetworkImage
    size_bytes: int = 0
    on_host: bool = False
    """Whether this host's kernel maps the image."""
    is_image: bool = False
    """Whether it was attached for a hypervisor before, and will be again after the unmap."""


def directory(run_dir: str) -> str:
    return os.path.join(run_dir, "rbd", syscalls.boot_id())


def noted(run_dir: str) -> tuple[volumes.VolumeId, ...]:
    """The volumes that are attached here, by the notes."""
    return tuple(map(volumes.VolumeId, listing.names(directory(run_dir))))


class RbdAccess:
    """The volumes of this node, as `users` reach them; `run_dir` is below /run.

    `node` is the node's name in the claims of its runtimes; empty: the host's name.
    """

    def __init__(
        self, users: Users, run_dir: str, node: str = "", kernel: krbd.KernelRbd = krbd.THIS_HOST
    ) -> None:
        self._users = users
        self._run_dir = run_dir
        self._directory = directory(run_dir)
        self._host = claims.Host.this(node)
        self._settling = threading.Lock()
        self._is_settled = False
        """Whether all images that this host's kernel does not map are free of its claims."""
        self._devices = HostDevices(self._host, replace(kernel, owner=self._host.node))

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """As `Users.use`. Frees images that an earlier boot had mapped, or that were unmapped without a key."""
        self._users.use(volume_id, secrets)
        if self._is_settled:
            return
        place = self._users.place(volume_id)
        try:  # all images, if the user may read their claims: the CO may have forgotten a volume
            with place.ioctx("cannot free images that this node has unmapped") as ioctx:
                for image in claim_object.images(ioctx):
                    self._free(place, ioctx, image)
        except binding.CephNotPermitted:
            self._free_if_known(volume_id)
        except errors.CrustError as err:
            _log.warning("images that this node has unmapped are not free", extra={"error": err})
        else:
            self._is_settled = True

    def _free_if_known(self, volume_id: volumes.VolumeId) -> None:
        """Free one image, if the cluster answers now. Otherwise the next key frees it."""
        place = self._known_place(volume_id)
        try:
            with place.ioctx(f"cannot free the image of {volume_id}") as ioctx:
                self._free(place, ioctx, volume_id)
        except errors.CrustError as err:
            extra = {"volume_id": volume_id, "error": err}
            _log.info("an image may still be claimed by this node", extra=extra)

    def _free(self, place: Namespace, ioctx: binding.Ioctx, image: str) -> None:
        """End this host's claim on an image that its kernel does not map, and is not about to map."""
        claim = claims.HostClaim(place.claimed(ioctx, image), self._host)
        claim.end_earlier_boots()
        with self._settling:
            note = self._read_note(image) if image in self.attached_here() else None
            if (note is not None and note.on_host) or claim.held() is None:
                return
            if self._devices.attached(place.network_image(image)) is None:
                claim.give_back()

    def _known_place(self, volume_id: volumes.VolumeId) -> Namespace:
        """The pool as the volume's user, or as any other user."""
        try:
            return self._users.place(volume_id)
        except CephKeyNotGiven:
            return self._users.shared

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """Note that this node uses the volume, and map it for this host itself. Raises `ImageMissing`,
        `ForeignImage`, `claims.ImageClaimed`, and the errors of `HostDevices.attach`.
        """
        mode = _MODES.get(access.mode, claim_object.Mode.WRITER)
        place = self._users.place(volume_id)
        if access.on_host and (why := self._devices.kernel.obstacle()):
            raise pool_access.NoHostDevice(why)
        previous = self._read_note(volume_id)
        if not access.on_host:
            if previous is not None and previous.on_host:
                self._detach_host(previous.image, volume_id)
            with place.ioctx(f"cannot look at the image of {volume_id}") as ioctx:
                note = self._seen(place, volume_id)
                claims.check_claimable(ioctx, volume_id, mode, self._host)
            self._write_note(note)
            return Attachment(note.image, note.size_bytes)
        image = self._seen(place, volume_id)
        is_image = previous is not None and (previous.is_image or not previous.on_host)
        note = image.model_copy(update={"on_host": True, "is_image": is_image})
        with self._settling:  # from here on the claim is this attach's
            self._write_note(note)
        try:
            return self._devices.attach(place, volume_id, mode, access)
        except errors.CrustError:
            if self._devices.attached(note.image) is None:
                if is_image:
                    self._write_note(image)
                else:
                    durable.remove(self._note(volume_id))
            raise

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        return noted(self._run_dir)

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """By the note, and the kernel or the image; without a key, and so without a use of it, by the note alone."""
        note = self._read_note(volume_id)
        if note is None:
            return None
        if note.on_host:
            attachment = self.host_device(volume_id)
            if attachment is not None or not note.is_image:
                return attachment
        with contextlib.suppress(*_NO_KEY):
            note = self._seen(self._users.place(volume_id), volume_id)
        return Attachment(note.image, note.size_bytes)

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """By the note, which is written before an image is mapped, and the kernel."""
        note = self._read_note(volume_id)
        if note is None or not note.on_host:
            return None
        return self._devices.attached(note.image)

    def orphans(self) -> tuple[Attachment, ...]:
        """None: an attachment is only a note."""
        return ()

    def drop(self, orphan: Attachment) -> None:
        """Nothing: there are no orphans."""

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The image's size, which its clients learn from librbd. Raises `CephKeyNotGiven`."""
        note = self._read_note(volume_id)
        if note is None:
            return None
        image = self._seen(self._users.place(volume_id), volume_id)
        if note.on_host:
            return self._devices.refresh(note.image, image.size_bytes)
        return Attachment(image.image, image.size_bytes)

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """By the object map, which the kernel's client keeps too. Raises `ImageMissing`."""
        return VolumeImages(self._users.place(volume_id)).is_empty(volume_id)

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Remove the note. Raises `StillAttached` while the client of a sandbox of this host has the image open.

        A claim whose client is not connected refuses nothing: its runtime may have had no key to give it back, and
        nobody would ever do so. That is safe, because the note holds nothing: the claim stays, so no other host gets
        the image before `crust ceph fence`, and a sandbox of this host takes it over. The detach does not end the
        claim: a frozen virtual machine looks the same. The proxy refuses an unstage below a guest that has the
        volume's claim, frozen or not. Without a key the cluster cannot be asked, and the note is removed for the same
        reasons.
        """
        note = self._read_note(volume_id)
        if note is not None:
            try:
                if note.on_host:
                    self._detach_host(note.image, volume_id)
                else:
                    with contextlib.suppress(*_NO_KEY):
                        self._check_closed(volume_id)
            except binding.CephPoolMissing as err:
                # the monitors' answer: there is no image, and no claim on it
                if note.image.pool not in ("", err.pool):
                    raise
                if note.on_host:
                    self._devices.unmap(note.image)
            durable.remove(self._note(volume_id))
        else:
            self._free_if_known(volume_id)
        self._users.forget(volume_id)

    def _detach_host(self, image: volumes.NetworkImage, volume_id: volumes.VolumeId) -> None:
        """Unmap, and give the claim back; without a key the next call with a key does that."""
        place = self._known_place(volume_id)
        try:
            # if the cluster does not answer, the kernel would wait without end
            with place.ioctx(f"cannot unmap the image of {volume_id}") as ioctx:
                claim = claims.HostClaim(place.claimed(ioctx, volume_id), self._host)
                claim.held()
                self._devices.unmap(image)
                claim.give_back()
        except _NO_KEY:
            self._is_settled = False
            self._devices.unmap(image)

    def _check_closed(self, volume_id: volumes.VolumeId) -> None:
        place = self._users.place(volume_id)
        with place.ioctx(f"cannot look at the claims on {volume_id}") as ioctx:
            holders = claim_object.read(ioctx, volume_id).claims.holders
            holders_here = [
                holder for holder in holders if holder.is_on(self._host.node, self._host.machine)
            ]
            if not holders_here:
                return
            present = place.claimed(ioctx, volume_id).watchers()
        for holder_here in holders_here:
            if holder_here.address in present:
                raise protocol.StillAttached(volume_id, f"an image of {holder_here.shown}")

    def _note(self, volume_id: str) -> str:
        pool_access.check_file_name(volume_id)
        return os.path.join(self._directory, volume_id)

    def _seen(self, place: Namespace, volume_id: volumes.VolumeId) -> _Note:
        """The image as it is in the cluster. Raises `ImageMissing`, `ForeignImage`."""
        size_bytes = VolumeImages(place).own_size_bytes(volume_id)
        return _Note(image=place.network_image(volume_id), size_bytes=size_bytes)

    def _write_note(self, note: _Note) -> None:
        durable.make_directories(self._directory, 0o700)
        path = self._note(note.image.image)
        durable.write_file(path, note.model_dump_json().encode() + b"\n")

    def _read_note(self, volume_id: str) -> _Note | None:
        data = durable.find(self._note(volume_id), limit_bytes=_NOTE_BYTES)
        if data is None:
            return None
        try:
            return _Note.model_validate_json(data)
        except pydantic.ValidationError:
            # a note that does not parse means that the volume is attached, too; one that cannot be read is an error
            return _Note(image=volumes.NetworkImage("", "", "", volume_id, (), ""))
