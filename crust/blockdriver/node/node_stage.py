"""NodeStageVolume: attach the device, and prepare its filesystem for a mount.

Nothing is mounted at the staging path, which stays the CO's empty directory: whether the host or a guest mounts the
volume is known only at publish. The steps, with a crash possible after each:

0. lock the volume for the programs that will run on it, or find that those of a killed driver still do;
1. attach the device (idempotent);
2. if the volume is new: write "formatting" into the content record, make the filesystem, write "formatted";
3. else: check it if its superblock is not clean;
4. record the stage in the node state. Only then can it be published.

The same volume may be staged at several paths (a PersistentVolume under a second name); it is detached with the last
(`node_unstage`).
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from crust.blockdriver.engines.node_access import Access, NoHostDevice
from crust.blockdriver.node.filesystem_preparation import FilesystemPreparation, Preparation
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.node_state import Staged
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.process import workers


@dataclass(frozen=True, slots=True)
class Stage:
    """A NodeStageVolume."""

    volume_id: volumes.VolumeId
    path: volumes.TargetPath
    capability: volumes.VolumeCapability
    access: Access
    """How the engine is to attach it."""


@dataclass(frozen=True, slots=True)
class NodeStage:
    """Stages volumes. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    preparation: FilesystemPreparation

    async def stage(self, request: Stage) -> None:
        """Prepare the volume for publishes.

        Raises `models.VolumeNotFound`, `capability_check.CapabilityExceeded`, `StagingPathMissing`,
        `StagedDifferently`, `capability_check.PublishedToOtherNode`, `AttachLimitReached`, the
        `VolumeInUseByTool`, the errors of `FilesystemPreparation.begin`, and of the engine and the filesystem's
        tools.
        """
        due = await workers.run(self._begin, request)
        if due is not None:
            await self.preparation.prepare(due)

    def _begin(self, request: Stage) -> Preparation | None:
        """Attach and check; a volume that needs nothing more is staged when this returns. All in one hop."""
        with ExitStack() as held:
            lock = held.enter_context(self.preparation.tool_locks.taking(request.volume_id))
            entry, wanted = self._attach(request, lock)
            due = wanted and self.preparation.begin(wanted, held)
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
                hint="unstage it there first",
            )
        present = self.stores.access.attached(request.volume_id) if staged else None
        if staged is not None and present is not None:
            paths = tuple(dict.fromkeys((*staged.paths, request.path.text)))
            return staged.model_copy(update={"paths": paths}), None
        with self.stores.attach_slots.taking(request.volume_id):
            attachment = self.stores.access.attach(request.volume_id, request.access)
        if attachment.device is None:
            return self._for_hypervisor(entry), None
        self.io_limits.settle(record.limits.value, attachment)
        if entry.kind == "block":
            self.preparation.give_out_raw(content, attachment)
            return entry, None
        if deferral_keys.formats_in_guest(record.parameters):
            return entry, None  # the host does not even look
        then = partial(self.stores.node_state.note_staged, entry)
        return entry, Preparation(
            content, entry.fs_type, attachment, record.parameters, then, inherits=(lock,)
        )

    def _for_hypervisor(self, entry: Staged) -> Staged:
        """A volume without a device here: a guest formats it, and a raw one has no place. Raises `NoHostDevice`."""
        if entry.kind == "block":
            self.stores.access.detach(entry.volume_id)
            raise NoHostDevice()
        return entry.model_copy(update={"host": "image"})

    def _entry(self, request: Stage, record: VolumeRecord, content: ContentRecord) -> Staged:
        """What is to be recorded of a stage that is allowed."""
        volume_id, access = request.volume_id, request.capability.access
        capability_check.check_not_elsewhere(record, self.stores.node_id)
        if why := self.stores.supported.obstacle(request.capability):
            raise capability_check.CapabilityExceeded(volume_id, why)
        if not os.path.isdir(request.path.text):
            raise errors.NotReady.named(
                "StagingPathMissing",
                f"the staging path {request.path.text} is not a directory",
                hint="create it before the call",
            )
        kind: Literal["mount", "block"] = "mount"
        fs_type = ""
        if isinstance(access, volumes.BlockAccess):
            kind = "block"
            # before it is given out: afterwards no guest would format it
            deferral_keys.check_host_publish(volume_id, record.parameters, is_block=True)
        else:
            fs_type = capability_check.wanted_fs_type(access, record, content.fs_type)
        return Staged(volume_id=volume_id, kind=kind, fs_type=fs_type, paths=(request.path.text,))
