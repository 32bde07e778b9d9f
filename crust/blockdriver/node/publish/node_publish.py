"""NodePublishVolume on the host: the filesystem is mounted on the target, or the device's node is bound to it.

The device itself is mounted, not a bind of the staging path: the kernel shares one filesystem instance among all
targets of a device. A read-only target is a read-only *mount* of a writable filesystem, so that another target may
write; the filesystem itself is read-only only in a read-only access mode, or beside a guest that reads. A read-only
raw volume needs a read-only device, since a read-only bind of a node does not stop writes.

Steps: write the entry, create the target, mount; the entry is done after a group change and growth that is due. A
failure undoes the steps, and so does the early end of a group change, which has no bound: its retry begins again, and
only looks at the files that have the group. A crash leaves an entry that the same request completes and that
NodeUnpublishVolume removes. An entry without its mount does not count as a publish (`NodeState.live_publishes`).
"""

import logging
from dataclasses import dataclass

from crust.blockdriver.host import device_mounts, fs_group, throttling
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_expand import NodeExpand
from crust.blockdriver.node.node_stage import Preparation
from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.node.publish.publish_rules import AdmittedPublish, Publish
from crust.blockdriver.records.stores import Stores
from crust.core import errors, operations, volumes
from crust.host.block import devices, users
from crust.host.files import target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import workers


class TargetOccupied(errors.Conflict):
    def __init__(self, target: str, occupant: str) -> None:
        super().__init__(f"{target} is occupied", why=f"{occupant} is mounted there")


_DONE = {"done": True}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    admitted: AdmittedPublish
    group: volumes.GroupChange | None
    grows: bool
    unmounts: bool
    """Whether a failure undoes the mount."""


@dataclass(frozen=True, slots=True)
class NodePublish:
    """Publishes volumes on the host. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    node_expand: NodeExpand
    host_image: HostImage
    target_roots: tuple[str, ...]

    async def publish_on_host(self, request: Publish) -> None:
        """Publish the volume; an equal publish that exists already is a success.

        Raises the errors of `HostImage.make_ready`, `publish_rules.check_publish` and, for a volume that a guest may
        have written, of `users.check`; `throttling.CannotThrottle`, `TargetOccupied`, and the errors of
        `target_paths`, `mount_api` and `fs_group`.
        """
        begun = await workers.run(self._begin, request)
        if begun is None:
            return
        if isinstance(begun, Preparation):
            await self.host_image.preparation.prepare(begun)
            await self.publish_on_host(request)
            return
        admitted, entry = begun.admitted, begun.admitted.entry
        if begun.group is not None:  # in steps, each with a place of its own
            walk = fs_group.steps(entry.target, begun.group)
            is_unfinished = True
            try:
                while is_unfinished:
                    async with workers.long_work(workers.LongWork.GROUP), workers.turn():
                        is_unfinished = await workers.run(next, walk, False)  # noqa: FBT003 - of `next`
                    if is_unfinished:
                        operations.check_wanted()
            except errors.CrustError:
                await workers.run(walk.close)  # or its descriptors would keep the mount busy
                await workers.run(self._undo_or_log, admitted, unmounts=begun.unmounts)
                raise
        if begun.grows:
            await self.node_expand.fill(
                admitted.content, admitted.attachment, entry.fs_type, request.target.text
            )
        await workers.run(self.stores.node_state.note_published, entry.model_copy(update=_DONE))

    def _begin(self, request: Publish) -> _Begun | Preparation | None:
        """Do all steps until the mount in one hop; returns what follows, or a preparation that comes first."""
        admitted = publish_rules.check_publish(self.stores, request)
        is_prepared = admitted.staged.host == "prepared" and admitted.attachment.device is not None
        if admitted.staged.host and not is_prepared:
            return self.host_image.make_ready(admitted) or self._begin(request)
        entry, device = admitted.entry, admitted.attachment.host_device  # raises NoHostDevice
        limits = admitted.record.limits.value
        if limits != throttling.NONE:
            self.io_limits.throttle.check_can_limit()
        if admitted.present is not None and admitted.present.done:
            self.io_limits.hold(limits, device)
            return None
        mounted = self._look(admitted)
        # A mount without an entry may have been answered long ago: a pod may be using it.
        unanswered = not mounted or admitted.present is not None
        is_larger = admitted.attachment.size_bytes > admitted.content.filled_bytes
        may_grow = entry.kind == "mount" and not entry.readonly and not admitted.others
        grows = unanswered and is_larger and may_grow
        access = request.capability.access
        group = None if entry.readonly or isinstance(access, volumes.BlockAccess) else access.group
        # If no step follows the mount, the mount itself shows that the publish is done.
        last, done_entry = group is None and not grows, entry.model_copy(update=_DONE)
        self.stores.node_state.note_published(done_entry if last else entry)
        try:
            if not mounted:
                self._mount(admitted)
            self.io_limits.hold(limits, device)
        except errors.CrustError:
            self._undo_or_log(admitted, unmounts=unanswered)
            raise
        return None if last else _Begun(admitted, group, grows, unanswered)

    def _look(self, admitted: AdmittedPublish) -> bool:
        """Whether the volume is mounted at the target already; raises `TargetOccupied` for another mount."""
        entry, mount = admitted.entry, mountinfo.at(admitted.entry.target)
        if mount is None:
            return False
        if mount_api.is_guard(mount):
            raise TargetOccupied(entry.target, "the guard mount of a deferred publish")
        is_block = entry.kind == "block"
        is_ours = device_mounts.is_node if is_block else device_mounts.is_filesystem
        if not is_ours(mount, admitted.attachment.host_device):
            raise TargetOccupied(entry.target, f"{mount.fs_type} from {mount.source}")
        if not is_block and mount.writes_here == entry.readonly:
            raise publish_rules.TargetPublishedDifferently(entry.target, entry.volume_id)
        return True

    def _mount(self, admitted: AdmittedPublish) -> None:
        entry, target, roots = admitted.entry, admitted.request.target, self.target_roots
        device = admitted.attachment.host_device.path
        if admitted.content.in_guest:
            # its virtual machine may live without a claim, and a second kernel would destroy the filesystem
            users.check(admitted.attachment.host_device, users.Purpose.HOST)
        if entry.kind == "block":
            devices.set_readonly(device, readonly=entry.readonly)
            target_paths.make_file(target, roots)
            mount_api.bind(device, target.text)
            return
        target_paths.make_directory(target, roots)
        reader_only = admitted.request.capability.mode.reader_only
        alone = reader_only or any(publish.deferred for publish in admitted.others)
        mount_api.mount_device(
            device,
            target.text,
            entry.fs_type,
            entry.options,
            readonly=entry.readonly,
            beside_writers=not alone,
            untrusted=admitted.content.in_guest or admitted.content.state == "raw",
        )

    def _undo_or_log(self, admitted: AdmittedPublish, *, unmounts: bool) -> None:
        """Undo the steps of this publish; an earlier mount without an entry may be a pod's, and stays.

        The CO's unpublish removes the rest; an error here does not hide the first error.
        """
        target = admitted.request.target
        try:
            mount = mountinfo.at(target.text) if unmounts else None
            if mount is not None and device_mounts.shows(mount, admitted.attachment.host_device):
                mount_api.unmount(target.text)
            self.stores.node_state.forget_published(admitted.request.volume_id, target)
            if unmounts and mountinfo.at(target.text) is None:
                target_paths.remove(target, self.target_roots)
        except errors.CrustError as err:
            extra = {"target": target.text, "error": err}
            _log.warning("a failed publish is not undone", extra=extra)
