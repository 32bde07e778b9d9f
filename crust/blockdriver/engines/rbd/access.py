"""The node's side: no device of this host, only the image's name for a hypervisor that opens it.

Attaching opens nothing. It checks that the image is there, and that no other node's sandbox has it when the volume
may have one writer; the runtime claims the image when its virtual machine starts (`crust.ceph.claims`), which is what
decides. What this node has attached is a note in the run directory, gone with the boot, like everything that a
hypervisor had open. The note has what was attached, without any key, so that the volume can be unstaged and counted
by a node that was started since and has no key so far (`lent_users`).
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Protocol

import pydantic

from crust import errors, volumes
from crust.blockdriver.engines.protocol import (
    READ_WRITE,
    Access,
    Attachment,
    StillAttached,
)
from crust.blockdriver.engines.rbd.images import VolumeImages
from crust.blockdriver.engines.rbd.lent_users import CephKeyNotGiven
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import claim_object, claims
from crust.ceph.claim_object import Mode
from crust.ceph.failures import CephKeyRefused, CephNotPermitted
from crust.host.files import durable
from crust.host.process import boot, oserrors

_MODES = {
    volumes.AccessMode.MULTI_NODE_READER_ONLY: Mode.READERS,
    volumes.AccessMode.MULTI_NODE_MULTI_WRITER: Mode.SHARED,
}
"""The others have one writer, or readers of one node: for a stage that is the same, one holder's host."""


_NO_KEY = (CephKeyNotGiven, CephKeyRefused, CephNotPermitted)


class Users(Protocol):
    """As whom the volumes are reached."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take a user for a volume from what a call brought."""
        ...

    def place(self, volume_id: volumes.VolumeId) -> Place:
        """The pool, as the volume's user. Raises `CephKeyNotGiven`."""
        ...

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """The volume is not used here any more."""
        ...


class _Note(pydantic.BaseModel):
    """What was attached; one of an older version is empty."""

    model_config = pydantic.ConfigDict(frozen=True)

    cluster: str = ""
    pool: str = ""
    namespace: str = ""
    monitors: str = ""
    user: str = ""
    size_bytes: int = 0


def directory(run_dir: str) -> str:
    """Where the notes are."""
    return os.path.join(run_dir, "rbd", boot.boot_id())


def noted(run_dir: str) -> tuple[volumes.VolumeId, ...]:
    """The volumes that are attached here, by the notes."""
    path = directory(run_dir)
    with oserrors.translating(f"cannot list {path}"):
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return ()
    return tuple(volumes.VolumeId(each) for each in sorted(names) if not each.startswith("."))


class RbdAccess:
    """The volumes of this node, as `users` reach them; `run_dir` is below /run.

    `node` is the node's name, the one that this node's runtimes have in their claims; empty: the host's name.
    """

    def __init__(self, users: Users, run_dir: str, node: str = "") -> None:
        self._users = users
        self._run_dir = run_dir
        self._directory = directory(run_dir)
        self._host = claims.Host.this(node)

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """As `Users.use`."""
        self._users.use(volume_id, secrets)

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """Note that the volume is used here. Raises `ImageMissing`, `claims.ImageClaimed`."""
        mode = _MODES.get(access.mode, Mode.WRITER)
        place = self._users.place(volume_id)
        with place.ioctx(f"cannot look at the image of {volume_id}") as ioctx:
            attachment = self._attachment(place, volume_id)
            claims.check_claimable(ioctx, volume_id, mode, self._host)
        durable.make_directories(self._directory, 0o700)
        durable.publish(self._note(volume_id), _text(attachment))
        return attachment

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """By the notes."""
        return noted(self._run_dir)

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """By the note, and the image; by the note alone where no key is here: no use of it begins without one."""
        if not os.path.exists(self._note(volume_id)):
            return None
        try:
            return self._attachment(self._users.place(volume_id), volume_id)
        except _NO_KEY:
            return self._attachment_noted(volume_id)

    def orphans(self) -> tuple[Attachment, ...]:
        """None: an attachment is only a note."""
        return ()

    def drop(self, orphan: Attachment) -> None:
        """There are none."""

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The image's size, which its clients learn from librbd. Raises `CephKeyNotGiven`."""
        if not os.path.exists(self._note(volume_id)):
            return None
        return self._attachment(self._users.place(volume_id), volume_id)

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """By the object map. Raises `ImageMissing`."""
        return VolumeImages(self._users.place(volume_id)).is_empty(volume_id)

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Remove the note. Raises `StillAttached` while the client of a sandbox of this host has the image open.

        A claim whose client is not connected refuses nothing: its runtime may have had no key to give it back, and
        nobody would ever do so. That is safe, because the note holds nothing: the claim stays, so no other host gets
        the image before `crust ceph fence`, and a sandbox of this host takes it over. It is not ended here: a virtual
        machine that is only frozen looks the same. The proxy refuses an unstage below a guest that has the volume's
        claim, frozen or not. Without a key nothing can be asked, and the note is removed for the same reasons.
        """
        if os.path.exists(self._note(volume_id)):
            with contextlib.suppress(*_NO_KEY):
                self._check_closed(volume_id)
            durable.remove(self._note(volume_id))
        self._users.forget(volume_id)

    def _check_closed(self, volume_id: volumes.VolumeId) -> None:
        place = self._users.place(volume_id)
        with place.ioctx(f"cannot look at the claims on {volume_id}") as ioctx:
            holders = claim_object.read(ioctx, volume_id).claims.holders
            here = [each for each in holders if each.may_be_on(self._host.node, self._host.machine)]
            if not here or not place.has_image(ioctx, volume_id):
                return
            with place.image(ioctx, volume_id) as image:
                present = claims.watchers(image)
        for each in here:
            if each.address in present:
                raise StillAttached(
                    volume_id, f"an image of the sandbox {each.sandbox} on node {each.node}"
                )

    def attach_limit(self, foreign: int) -> int:
        """None of the engine's own."""
        return 0

    def foreign_attachments(self) -> int:
        """None that take anything of this node's kernel."""
        return 0

    def foreign_at_most(self) -> int:
        """The same."""
        return 0

    def _note(self, volume_id: volumes.VolumeId) -> str:
        if not volume_id.replace("-", "").isalnum() or not volume_id.isascii():
            raise errors.InvalidRequest(f"{volume_id!r} cannot be the name of an image")
        return os.path.join(self._directory, volume_id)

    def _attachment(self, place: Place, volume_id: volumes.VolumeId) -> Attachment:
        size_bytes = VolumeImages(place).size_bytes(volume_id)
        who = place.connection.who
        image = volumes.NetworkImage(
            cluster=place.connection.fsid(),
            pool=place.pool,
            namespace=place.namespace,
            image=volume_id,
            monitors=(who.monitors,),
            user=who.user,
        )
        return Attachment(image, size_bytes)

    def _attachment_noted(self, volume_id: volumes.VolumeId) -> Attachment | None:
        with oserrors.translating(f"cannot read the note of {volume_id}"):
            try:
                with open(self._note(volume_id), "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return None
        try:
            note = _Note.model_validate_json(data)
        except pydantic.ValidationError:
            note = _Note()  # that it is there says that the volume is attached
        image = volumes.NetworkImage(
            cluster=note.cluster,
            pool=note.pool,
            namespace=note.namespace,
            image=volume_id,
            monitors=(note.monitors,),
            user=note.user,
        )
        return Attachment(image, note.size_bytes)


def _text(attachment: Attachment) -> bytes:
    image = attachment.source
    assert isinstance(image, volumes.NetworkImage)
    note = _Note(
        cluster=image.cluster,
        pool=image.pool,
        namespace=image.namespace,
        monitors=",".join(image.monitors),
        user=image.user,
        size_bytes=attachment.size_bytes,
    )
    return note.model_dump_json().encode() + b"\n"
