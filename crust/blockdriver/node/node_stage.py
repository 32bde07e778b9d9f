"""NodeStageVolume: attach the device, and prepare its filesystem for a mount.

The driver mounts nothing at the staging path, which stays the CO's empty directory: the publish decides whether the
host or a guest mounts the volume. The steps, with a crash possible after each:

0. lock the volume for the programs that will run on it, unless programs of a killed driver still run;
1. attach the device (idempotent);
2. if the volume is new: write "formatting" into the content record, make the filesystem, write "formatted";
3. else: check it if its superblock is not clean;
4. record the stage in the node state. Only then can it be published.

The same volume may be staged at several paths (a PersistentVolume under a second name); it is detached with the last
(`node_unpublish`).

In the preparation the content record comes first, always: "formatting" is durable before mkfs runs, "raw" before a
user has the device. That write is refused if another writer has changed the record meanwhile (`RecordChanged`), so a
stale record leads to no format. Each program that runs has the volume's lock (`crust.host.files.locks`) and the open
device.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from crust.blockdriver.engines.pool_access import Access, Attachment, NoHostDevice
from crust.blockdriver.host import device_mounts, fsck
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.node_state import Staged
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.block import devices, signatures, users
from crust.host.files import listing, locks, target_paths
from crust.host.filesystems import format_decision, mkfs, superblocks
from crust.host.filesystems.format_decision import Action
from crust.host.process import syscalls, workers


@dataclass(frozen=True, slots=True)
class Preparation:
    """The work on a volume's device before a mount. The volume is locked for the programs that do it."""

    content: ContentRecord
    fs_type: str
    attachment: Attachment
    parameters: Mapping[str, str]
    note_done: Callable[[], None]
    """Notes the end of the work. Blocks."""
    inherits: tuple[int, ...]
    """The descriptors that the programs inherit: the volume's lock, then the open device."""
    action: Action = Action.KEEP
    held: ExitStack = field(default_factory=ExitStack)
    """Closes the descriptors."""
    guest_kernel: str = ""
    """The kernel of the only guests that the volume is for; empty: not known."""


@dataclass(frozen=True, slots=True)
class FilesystemPreparation:
    """Makes and checks filesystems. The caller makes one call per volume at a time."""

    stores: Stores
    tool_locks: locks.ToolLocks

    def begin(
        self, due: Preparation, descriptors: ExitStack, *, readonly: bool = False
    ) -> Preparation | None:
        """Look at the device; None if it can be mounted now. Else record the intended filesystem for `prepare`, which
        gets the `descriptors`. Raises the errors of `format_decision`, `DeviceInUse`, `RecordChanged`.
        """
        device, content = due.attachment.host_device.path, due.content
        hold = self._hold(due)
        if hold is None:
            return None
        with syscalls.closing(hold):
            action = self._look(due)
            if readonly:
                format_decision.check_readable(content.volume_id, action)
            if action is None or readonly:
                return None
            makes = action in (Action.MAKE, Action.CLEAR_AND_MAKE)
            if not due.attachment.is_new:  # the driver gave a new device to no user
                # a plain open passes beside this hold
                purpose = users.Purpose.FORMAT if makes else users.Purpose.HOST
                users.check(due.attachment.host_device, purpose, is_mine=True)
            if makes:
                # the driver gave the device to no user since it judged it
                mkfs.check_size(device, due.fs_type, due.attachment.size_bytes)
                if due.guest_kernel:
                    mkfs.check_kernel(due.fs_type, due.guest_kernel)
                intended = content.replaced(
                    state="formatting",
                    fs_type=due.fs_type,
                    planned_uuid=str(uuid.uuid4()),
                    filled_bytes=due.attachment.size_bytes,
                )
                content = self.stores.content_records.save(intended)
            if action is Action.MAKE:
                devices.write_back(device)  # the writes since the look
                if not self.stores.access.is_empty(content.volume_id):
                    mkfs.check_blank(device, signatures.probe(device))
            opened = devices.open_shared(device)
            descriptors.callback(os.close, opened)
        if action is Action.CLEAR_AND_MAKE:
            devices.zero_device(device)
        inherits = (*due.inherits, opened)
        return replace(
            due, action=action, content=content, inherits=inherits, held=descriptors.pop_all()
        )

    def _hold(self, due: Preparation) -> int | None:
        """The device, opened exclusively; none while this host has mounted it, and so prepared it before. Any other
        holder may be a guest, or a tool that a killed driver left running: `DeviceInUse`.
        """
        device = due.attachment.host_device
        hold = devices.try_exclusive(device.path)
        if hold is None:
            is_mounted = device_mounts.filesystem_mounts(device)
            if not is_mounted or self._look(due) not in (None, Action.KEEP):
                # raises with the holder, or succeeds if it is free by now
                hold = devices.open_exclusive(device.path)
        return hold

    def _look(self, due: Preparation) -> Action | None:
        content, fs_type, device = due.content, due.fs_type, due.attachment.host_device.path
        if (content.state, content.fs_type) == ("formatted", fs_type):
            recorded = superblocks.find(device, fs_type)  # one read
            if recorded is not None:
                return None if recorded.clean else Action.KEEP
        # It does not probe a new volume while the engine stores no data of it.
        new = content.state == "new"
        if new and not due.attachment.is_new:
            devices.write_back(device)
        zeros = new and self.stores.access.is_empty(content.volume_id)
        return format_decision.judge(
            _recorded(content),
            fs_type,
            signatures.Blank() if zeros else signatures.probe(device),
            superblock_of=lambda fs_type: superblocks.find(device, fs_type),
        )

    def give_out_raw(self, content: ContentRecord, attachment: Attachment) -> None:
        """Record that a user has the device from here on: this driver never formats it again."""
        if content.state == "raw":
            return
        if content.state == "formatting":
            # This write refuses a stale record, before its word leads to a clear.
            content = self.stores.content_records.save(content)
            # It zeroes the rest of an interrupted mkfs, but never a complete filesystem, which may have been used.
            device = attachment.host_device
            action = format_decision.judge_interrupted(
                _recorded(content),
                signatures.probe(device.path),
                superblock_of=lambda fs_type: superblocks.find(device.path, fs_type),
            )
            if action is Action.CLEAR_AND_MAKE:
                users.check(device, users.Purpose.FORMAT)
                devices.zero_device(device.path)
        self.stores.content_records.save(content.replaced(state="raw", fs_type="", planned_uuid=""))

    async def prepare(self, due: Preparation) -> None:
        """Do the work that `begin` found; raises the errors of the tools, which have the volume's lock."""
        device, fs_type, inherits = due.attachment.host_device.path, due.fs_type, due.inherits
        with due.held:
            if due.action in (Action.KEEP, Action.ADOPT):
                completely = due.action is Action.ADOPT
                await fsck.check_filesystem(
                    device, fs_type, completely=completely, inherits=inherits
                )
            else:
                await mkfs.make(
                    device,
                    fs_type,
                    uuid=due.content.planned_uuid,
                    extra_options=mkfs.arguments(fs_type, due.parameters),
                    looks=due.action is Action.CLEAR_AND_MAKE,
                    inherits=inherits,
                )
            await workers.run(self._end, due)

    def _end(self, due: Preparation) -> None:
        content = due.content
        if due.action is Action.ADOPT:
            # The mkfs may have been killed between its last write and its sync.
            devices.sync(due.attachment.host_device.path)
        if due.action is not Action.KEEP:
            generation = content.generation + 1
            formatted = content.replaced(state="formatted", planned_uuid="", generation=generation)
            self.stores.content_records.save(formatted)
        due.note_done()


def _recorded(content: ContentRecord) -> format_decision.Content:
    return format_decision.Content(
        content.volume_id,
        content.state,
        content.fs_type,
        content.planned_uuid,
        in_guest=content.in_guest,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    volume_id: volumes.VolumeId
    path: volumes.TargetPath
    capability: volumes.VolumeCapability
    access: Access
    """The engine attaches it with this access."""
    guest_kernel: str = ""
    """As in `Preparation`."""


@dataclass(frozen=True, slots=True)
class NodeStage:
    """Stages volumes. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    preparation: FilesystemPreparation
    target_roots: tuple[str, ...]

    def may_be_left(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the device of the volume is attached, or may be. Blocks."""
        try:
            return self.stores.access.attached(volume_id) is not None
        except (errors.InvalidRequest, errors.NotFound, errors.Corrupt):
            # there is no image, or none can have that name, or a person must look at it
            return False
        except Exception:  # a look that fails has not seen that it is detached
            return True

    async def stage(self, request: Stage) -> None:
        """Prepare the volume for publishes. After a failure the device may be attached (`may_be_left`).

        Raises `target_paths.PathOutsideRoots`, though nothing is mounted at the path, because a publish would have
        the same fault; `models.VolumeNotFound`, `capability_check.CapabilityExceeded`, `StagingPathMissing`,
        `StagedDifferently`, `capability_check.PublishedToOtherNode`, `AttachLimitReached`, the
        `VolumeInUseByTool`, the errors of `FilesystemPreparation.begin`, and of the engine and the filesystem's
        tools.
        """
        target_paths.root_of(request.path, self.target_roots)
        due = await workers.run(self._begin, request)
        if due is not None:
            await self.preparation.prepare(due)

    def _begin(self, request: Stage) -> Preparation | None:
        """Attach and check in one hop; returns the work that is left, or stages the volume and returns None."""
        with ExitStack() as descriptors:
            lock = descriptors.enter_context(self.preparation.tool_locks.taking(request.volume_id))
            entry, preparation = self._attach(request, lock)
            due = preparation and self.preparation.begin(preparation, descriptors)
            if due is None:
                self.stores.node_state.note_staged(entry)
            return due

    def _attach(self, request: Stage, lock: int) -> tuple[Staged, Preparation | None]:
        self.stores.access.use(request.volume_id, request.access.secrets)
        record = self.stores.volume_records.load(request.volume_id)
        content = self.stores.content_records.load(request.volume_id)
        entry = self._entry(request, record, content)
        staged = self.stores.node_state.of(request.volume_id).stage
        if staged is not None and (staged.kind, staged.fs_type) != (entry.kind, entry.fs_type):
            how = f"{staged.kind} {staged.fs_type}".strip()
            raise errors.Conflict.named(
                "StagedDifferently",
                f"{request.volume_id} is staged already",
                why=f"as {how}, at {', '.join(staged.paths)}",
            )
        if staged is not None:  # its paths are the CO's, also after a detach by another program
            paths = tuple(dict.fromkeys((*staged.paths, request.path.text)))
            entry = entry.model_copy(update={"paths": paths})
            if self.stores.access.attached(request.volume_id) is not None:
                return staged.model_copy(update={"paths": paths}), None
        with self.stores.attach_slots.taking(request.volume_id):
            access = replace(request.access, keeps_blocks=record.thick)
            attachment = self.stores.access.attach(request.volume_id, access)
        if attachment.device is None and entry.kind == "block":
            self.stores.access.detach(request.volume_id)
            raise NoHostDevice()
        if attachment.device is None:  # a guest formats it
            return entry.model_copy(update={"host": "image"}), None
        self.io_limits.settle(record.limits.value, attachment)
        if entry.kind == "block":
            self.preparation.give_out_raw(content, attachment)
            return entry, None
        if content.format_in != "host":
            return entry, None  # the host does not look at the content
        note_done = partial(self.stores.node_state.note_staged, entry)
        return entry, Preparation(
            *(content, entry.fs_type, attachment, record.parameters, note_done),
            inherits=(lock,),
            guest_kernel=request.guest_kernel,
        )

    def _entry(self, request: Stage, record: VolumeRecord, content: ContentRecord) -> Staged:
        volume_id, access = request.volume_id, request.capability.access
        # published to no node: a CO with CSIDriver attachRequired: false never publishes to nodes
        if record.nodes and all(node.node_id != self.stores.node_id for node in record.nodes):
            raise capability_check.PublishedToOtherNode(volume_id, record.nodes[0].node_id)
        if obstacle := self.stores.supported.obstacle(request.capability):
            raise capability_check.CapabilityExceeded(volume_id, obstacle)
        if not listing.is_directory(request.path.text):
            raise errors.NotReady.named(
                "StagingPathMissing", f"the staging path {request.path.text} is not a directory"
            )
        kind: Literal["mount", "block"] = "mount"
        fs_type = ""
        if isinstance(access, volumes.BlockAccess):
            kind = "block"
            # before it is given out: afterwards no guest would format it
            deferral_keys.check_host_publish(volume_id, content.format_in, is_block=True)
        else:
            fs_type = capability_check.wanted_fs_type(access, record, content.fs_type)
        return Staged(volume_id=volume_id, kind=kind, fs_type=fs_type, paths=(request.path.text,))
