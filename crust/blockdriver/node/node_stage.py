"""NodeStageVolume and NodeUnstageVolume: attach the device, and prepare its filesystem for a mount.

Nothing is mounted at the staging path, which stays the CO's empty directory: whether the host or a guest mounts the
volume is known only at publish. The steps, with a crash possible after each:

1. attach the device (idempotent);
2. if the volume is new: write "formatting" into the content record, make the filesystem, write "formatted";
3. else: check it if its superblock is not clean;
4. record the stage in the node state. Only then can it be published.

The same volume may be staged at several paths (a PersistentVolume under a second name); it is detached with the last.
"""

import asyncio
import os
from dataclasses import dataclass, field
from typing import Literal

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Attachment, Backend
from crust.blockdriver.node import format_decision
from crust.blockdriver.node.attach_slots import AttachSlots
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.node.node_state import NodeState, Staged
from crust.blockdriver.records import capability_check, published_nodes
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.content_record import ContentRecord
from crust.blockdriver.records.content_records import ContentRecords
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.volume_record import VolumeRecord
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.host.block import devices, signatures, zeroout
from crust.host.filesystems import fsck, mkfs_options, superblocks
from crust.host.filesystems.mkfs_compatibility import MkfsCompatibility
from crust.host.mounts import device_mounts


class StagingPathMissing(errors.NotReady):
    """The staging path does not exist; the CO creates it (CSI NodeStageVolume)."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the staging path {path} is not a directory", hint="create it before the call"
        )
        self.path = path


class StagedDifferently(errors.Conflict):
    """The volume is staged with another capability."""

    def __init__(self, volume_id: str, staged: Staged) -> None:
        how = f"{staged.kind} {staged.fs_type}".strip()
        super().__init__(
            f"{volume_id} is staged already",
            why=f"as {how}, at {', '.join(staged.paths)}",
            hint="unstage it there first",
        )
        self.volume_id = volume_id


class StillPublished(errors.NotReady):
    """The volume to be unstaged is still published."""

    def __init__(self, volume_id: str, targets: tuple[str, ...]) -> None:
        super().__init__(
            f"{volume_id} cannot be unstaged",
            why=f"it is still published at {', '.join(targets)}",
            hint="unpublish it there first",
        )
        self.volume_id = volume_id
        self.targets = targets


@dataclass(frozen=True, slots=True)
class Stage:
    """A NodeStageVolume."""

    volume_id: volumes.VolumeId
    path: volumes.TargetPath
    capability: volumes.VolumeCapability


@dataclass(frozen=True, slots=True)
class _Begun:
    entry: Staged
    record: VolumeRecord
    content: ContentRecord
    attachment: Attachment
    action: format_decision.Action | None
    """None: the device needs nothing."""


@dataclass(frozen=True, slots=True)
class NodeStage:
    """Stages and unstages volumes. The caller makes one call per volume at a time."""

    pool: Pool
    volume_records: VolumeRecords
    content_records: ContentRecords
    node_state: NodeState
    live: LiveVolumes
    backend: Backend
    supported: SupportedCapabilities
    io_limits: IoLimits
    attach_slots: AttachSlots
    node_id: str
    fitting: MkfsCompatibility = field(default_factory=MkfsCompatibility)

    async def stage(self, request: Stage) -> None:
        """Prepare the volume for publishes.

        Raises `volume_records.VolumeNotFound`, `capability_check.CapabilityExceeded`, `StagingPathMissing`,
        `StagedDifferently`, `published_nodes.PublishedToOtherNode`, `AttachLimitReached`, the
        errors of `format_decision.judge`, and of the backend and the filesystem's tools.
        """
        begun = await asyncio.to_thread(self._begin, request)
        if begun.action is None:
            return
        await self._prepare(begun)
        await asyncio.to_thread(self.node_state.note_staged, begun.entry)

    def _begin(self, request: Stage) -> _Begun:
        """Attach and check; a volume that needs nothing more is staged when this returns."""
        begun = self._attach(request)
        if begun.action is None:
            self.node_state.note_staged(begun.entry)
        return begun

    def _attach(self, request: Stage) -> _Begun:
        record = self.volume_records.load(request.volume_id)
        content = self.content_records.load(request.volume_id)
        published_nodes.check_not_elsewhere(record, self.node_id)
        self._check(request)
        entry = self._entry(request, record, content)
        staged = self.node_state.staged(request.volume_id)
        if staged is not None and (staged.kind, staged.fs_type) != (entry.kind, entry.fs_type):
            raise StagedDifferently(request.volume_id, staged)
        present = self.backend.attached(request.volume_id) if staged else None
        if staged is not None and present is not None:
            paths = tuple(dict.fromkeys((*staged.paths, request.path.text)))
            entry = staged.model_copy(update={"paths": paths})
            return _Begun(entry, record, content, present, None)
        with self.attach_slots.taking(request.volume_id):
            attachment = self.backend.attach(request.volume_id)
        self.io_limits.settle(record.io_limits, attachment)
        if entry.kind == "block":
            self._give_out_raw(content, attachment)
            return _Begun(entry, record, content, attachment, None)
        action = _judge(content, entry.fs_type, attachment)
        return _Begun(entry, record, content, attachment, action)

    def _check(self, request: Stage) -> None:
        why = self.supported.obstacle(request.capability)
        if why:
            raise capability_check.CapabilityExceeded(request.volume_id, why)
        if not os.path.isdir(request.path.text):
            raise StagingPathMissing(request.path.text)

    def _entry(self, request: Stage, record: VolumeRecord, content: ContentRecord) -> Staged:
        access = request.capability.access
        kind: Literal["mount", "block"] = "mount"
        fs_type = ""
        if isinstance(access, volumes.BlockAccess):
            kind = "block"
        else:
            fs_type = capability_check.wanted_fs_type(access, record, content.fs_type)
        return Staged(
            volume_id=request.volume_id, kind=kind, fs_type=fs_type, paths=(request.path.text,)
        )

    def _give_out_raw(self, content: ContentRecord, attachment: Attachment) -> None:
        """Record that a user has the device from here on: this driver never formats it again."""
        if content.state == "raw":
            return
        if content.state == "formatting":
            content = self.content_records.save(
                content
            )  # refused if it is stale, before anything is cleared
            zeroout.zero_device(attachment.source.path)
        self.content_records.save(content.but(state="raw", fs_type=""))

    async def _prepare(self, begun: _Begun) -> None:
        device, fs_type = begun.attachment.source.path, begun.entry.fs_type
        if begun.action is format_decision.Action.KEEP:
            await fsck.check(device, fs_type)
            return
        intended = await asyncio.to_thread(self._intend, begun)
        words = mkfs_options.words(fs_type, begun.record.parameters)
        await self.fitting.make(device, fs_type, extra_options=words)
        made = intended.but(
            state="formatted",
            filled_bytes=begun.attachment.size_bytes,
            generation=intended.generation + 1,
        )
        await asyncio.to_thread(self.content_records.save, made)

    def _intend(self, begun: _Begun) -> ContentRecord:
        """Write the record first, because a stale one is refused there, before anything is cleared."""
        intended = begun.content.but(state="formatting", fs_type=begun.entry.fs_type)
        intended = self.content_records.save(intended)
        if begun.action is format_decision.Action.CLEAR_AND_MAKE:
            zeroout.zero_device(begun.attachment.source.path)
        return intended

    async def unstage(self, volume_id: volumes.VolumeId, path: volumes.TargetPath) -> None:
        """Detach the volume if `path` is the last one it is staged at; not staged, or unknown, is a success.

        Raises `StillPublished`, and `NotReady` with the holder while the device is in use.
        """
        await asyncio.to_thread(self._unstage, volume_id, path)

    def _unstage(self, volume_id: volumes.VolumeId, path: volumes.TargetPath) -> None:
        if not self.pool.ids.is_volume_id(volume_id):
            return
        staged = self.node_state.staged(volume_id)
        others = () if staged is None else _others(staged, path.text)
        if staged is not None and others:
            self.node_state.note_staged(staged.model_copy(update={"paths": others}))
            return
        published = self.live.live_publishes(volume_id)
        if published:
            raise StillPublished(volume_id, tuple(entry.target for entry in published))
        attachment = self.backend.attached(volume_id)
        if attachment is not None:
            _check_unmounted(volume_id, attachment)
            if staged is None or staged.kind == "block":
                _check_unbound(volume_id, attachment)
            self.io_limits.let_go(attachment)
            self.backend.detach(volume_id)
        for stale in self.node_state.published_of(volume_id):
            self.node_state.forget_published(volumes.TargetPath(stale.target))
        self.node_state.forget_staged(volume_id)


def _check_unmounted(volume_id: volumes.VolumeId, attachment: Attachment) -> None:
    if devices.is_free(attachment.source.path, attachment.source.identity):
        return
    mounted = device_mounts.filesystem_mounts(attachment.source)
    if mounted:
        raise StillPublished(volume_id, tuple(mount.target for mount in mounted))


def _check_unbound(volume_id: volumes.VolumeId, attachment: Attachment) -> None:
    bound = device_mounts.node_mounts(attachment.source)
    if bound:
        raise StillPublished(volume_id, tuple(mount.target for mount in bound))


def _judge(
    content: ContentRecord, fs_type: str, attachment: Attachment
) -> format_decision.Action | None:
    """The action that the device needs; none while this host has mounted it: then it was prepared before.

    Anyone else who has it may be a guest, or a tool that a killed driver left running: `DeviceInUse`.
    """
    device = attachment.source.path
    hold = devices.try_exclusive(device)
    if hold is None:
        return _judge_held(content, fs_type, attachment)
    try:
        found = _vouched(content, fs_type, device)
        if found is None:
            return _judge_unknown(content, fs_type, device)
        return None if found.clean else format_decision.Action.KEEP
    finally:
        os.close(hold)


def _judge_held(
    content: ContentRecord, fs_type: str, attachment: Attachment
) -> format_decision.Action | None:
    device = attachment.source.path
    known = _vouched(content, fs_type, device) is not None
    action = format_decision.Action.KEEP if known else _judge_unknown(content, fs_type, device)
    if action is format_decision.Action.KEEP and device_mounts.filesystem_mounts(attachment.source):
        return None
    os.close(
        devices.open_exclusive(device)
    )  # raises with the holder, or succeeds if it is free by now
    return action


def _vouched(content: ContentRecord, fs_type: str, device: str) -> superblocks.Superblock | None:
    """The superblock of the recorded filesystem, if the device has it: one read."""
    if (content.state, content.fs_type) != ("formatted", fs_type):
        return None
    return superblocks.find(device, fs_type)


def _judge_unknown(content: ContentRecord, fs_type: str, device: str) -> format_decision.Action:
    probe = signatures.probe if content.state == "new" else signatures.probe_untrusted
    found = probe(device)
    return format_decision.judge(content, fs_type, found, is_blank=lambda: devices.is_blank(device))


def _others(staged: Staged, path: str) -> tuple[str, ...]:
    """The other staging paths, without those that the CO has removed."""
    return tuple(each for each in staged.paths if each != path and os.path.isdir(each))
