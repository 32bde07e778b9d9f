"""The node's side of the files: each is attached by one loop device.

A loop device belongs to a file by (device, inode), whichever process attached it, so a restarted driver finds its
attachments. A search through all loop devices takes time in proportion to their number, so the device of a volume is
cached, and used only after a comparison of its disk sequence, which no second attachment can have.

Each device carries a tag: the identity of the pool's directory and the end of the volume's id. So the driver
recognises its device after the file was unlinked, and never treats another program's device as its own, even a device
of its images. To see the tag it opens only devices of files with the name of an image of this pool: other devices may
hang. An image that was renamed by hand while it was attached keeps its device. A pool that was restored from a backup
has other directories; then the path of the deleted file says that the device is the pool's.

If a backup is put back while its device is attached, the device writes to a file without a name. The driver compares
the file at the image's path with the file of the device at each use, and refuses the use (`ImageReplaced`). It does
not detach the device, which alone has the data.
"""

import fnmatch
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from crust.blockdriver.engines.files.directories import VolumeDirectories
from crust.blockdriver.engines.pool_access import READ_WRITE, Access, Attachment
from crust.blockdriver.engines.protocol import ImageMissing, ImageReplaced
from crust.blockdriver.host import btrfs
from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import devices, loop
from crust.host.files import listing, sparse

_MARK = "crust:"
_TAG_ID_BYTES = 44
"""The kernel keeps 63 bytes of a tag; the pool's part of it takes 19."""


@dataclass(eq=False)
class FileAccess:
    _directories: VolumeDirectories
    _known: dict[volumes.VolumeId, loop.LoopDevice] = field(default_factory=dict, init=False)
    _tag: str = field(default="", init=False)
    """The tag of this pool's loop devices, to which the end of the volume's id is appended."""
    is_btrfs: bool = field(default=False, init=False)
    """Whether the pool is on btrfs, from `open` on."""

    def open(self) -> None:
        """Find the attached volumes of the pool, whose directory exists."""
        pool = os.stat(self._directories.directory)
        digest = hashlib.sha256(f"{pool.st_dev}:{pool.st_ino}".encode()).hexdigest()
        self._tag = f"{_MARK}{digest[:12]}:"
        self.is_btrfs = bool(btrfs.filesystem_id(self._directories.directory))
        self._known = {
            volume_id: device for device, volume_id in self._ours() if volume_id is not None
        }

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Files need no credentials."""

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """One loop device per file, for any access, because no other node reaches the file; with direct I/O unless
        that makes clones slow. On btrfs it frees no block: a part of an extent that is discarded stays allocated, and
        a later write there takes another block.
        """
        device = self._usable(volume_id) if volume_id in self._known else None
        is_new = False
        if device is None:
            path = self._directories.image(volume_id)
            # Only this process attaches files of the pool: a file without a writer has no device.
            is_new, tag = not sparse.has_writers(path), self._tag + volume_id[-_TAG_ID_BYTES:]
            try:
                device = loop.attach(path, direct_io=not self.is_btrfs, tag=tag, once=not is_new)
            except errors.NotFound as err:
                if listing.exists(path):
                    raise
                raise ImageMissing(volume_id) from err
            self._known[volume_id] = device
        # at each attach: a driver may have been killed before it
        if access.keeps_blocks or self.is_btrfs:
            loop.keep_blocks(device)
        return replace(_attachment(device), is_new=is_new)

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes whose file has a loop device, attached before the start or after it."""
        return tuple(self._known.copy())

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        device = self._usable(volume_id)
        return None if device is None else _attachment(device)

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Every attachment is a loop device of this host, also one whose file was replaced."""
        device = self._device(volume_id)
        return None if device is None else _attachment(device)

    def orphans(self) -> tuple[Attachment, ...]:
        return tuple(_attachment(device) for device, volume_id in self._ours() if volume_id is None)

    def drop(self, orphan: Attachment) -> None:
        for device, volume_id in self._ours():
            if volume_id is None and device.identity == orphan.host_device.identity:
                loop.detach(device)

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        device = self._usable(volume_id)
        if device is None:
            return None
        loop.refresh_size(device)
        return _attachment(device)

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """By the file's holes."""
        try:
            return sparse.is_hole(self._directories.image(volume_id))
        except errors.NotFound as err:
            raise ImageMissing(volume_id) from err

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach the file's loop device; raises `holders.DeviceInUse`, `ImageReplaced`."""
        device = self._usable(volume_id)
        if device is not None:
            loop.detach(device)
        self._known.pop(volume_id, None)

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """Raise `ImageReplaced` if the volume's device has another file than the image. Cheap without a device."""
        if volume_id in self._known:
            self._usable(volume_id)

    def _usable(self, volume_id: volumes.VolumeId) -> loop.LoopDevice | None:
        """The volume's device. Raises `ImageReplaced`, `NotSeen`."""
        device = self._device(volume_id)
        if device is not None:
            status = answers.seen(self._directories.look_at(volume_id))
            if status is not None and (status.st_dev, status.st_ino) != device.file:
                raise ImageReplaced(volume_id, device.path)
        return device

    def _device(self, volume_id: volumes.VolumeId) -> loop.LoopDevice | None:
        """The cached device, if it is still the same (the kernel reuses no disk sequence); else by a search."""
        cached = self._known.get(volume_id)
        if cached is not None and devices.size_of(cached.identity):
            return cached
        path = self._directories.image(volume_id)
        # of a pool that was here before: its files cannot be reached
        if not self._directories.is_id(volume_id):
            named = loop.list_named(os.path.basename(path).__eq__)
            marks = f"{_MARK}*:{volume_id[-_TAG_ID_BYTES:]}"
            attached = tuple(device for device in named if fnmatch.fnmatch(device.tag, marks))
        # The search reads the file name of every loop device of the node; most volumes have no device.
        else:
            attached = loop.find(path) if sparse.has_writers(path) else ()
        if len(attached) > 1:
            raise loop.LoopAttachedDifferently(
                str(path), attached, "more than one loop device writes to the file"
            )
        if not attached:
            self._known.pop(volume_id, None)
            return None
        self._known[volume_id] = attached[0]
        return attached[0]

    def _ours(self) -> list[tuple[loop.LoopDevice, volumes.VolumeId | None]]:
        """The loop devices that a driver attached for this pool, with their volumes; None without volume or image."""
        place = os.path.realpath(str(self._directories.directory))
        named = loop.list_named(self._directories.is_image)
        by_tag = {one[-_TAG_ID_BYTES:]: one for one in self._directories.ids()} if named else {}
        ours: list[tuple[loop.LoopDevice, volumes.VolumeId | None]] = []
        for device in named:
            # of a pool that was restored from a backup: its folder was deleted, or the file in it
            is_restored = (
                device.backing.startswith(f"{place}/")
                and device.backing.endswith(" (deleted)")
                and device.tag.startswith(_MARK)
            )
            if not device.tag.startswith(self._tag) and not is_restored:
                continue
            volume_id = by_tag.get(device.tag.rpartition(":")[2])
            # an image that is not seen may be the same, so the device stays
            is_gone = volume_id is None or isinstance(
                self._directories.look_at(volume_id), answers.Absent
            )
            ours.append((device, None if is_gone else volume_id))
        return ours


def _attachment(device: loop.LoopDevice) -> Attachment:
    source = volumes.BlockSource(device.path, device.identity)
    return Attachment(source, devices.size_of(device.identity))
