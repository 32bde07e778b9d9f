"""What a stage does to a device so that it can be mounted: nothing, a check, or a new filesystem.

The content record comes first, always: "formatting" is durable before mkfs runs, "raw" before a user has the device.
A record that somebody else wrote meanwhile is refused there (`RecordChanged`), so nothing is made or cleared on
the word of a stale one.

Each program that runs has the volume's lock (`crust.host.files.locks`) and the open device.
"""

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from crust.blockdriver.engines.node_access import Attachment
from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.stores import Stores
from crust.host.block import devices, in_use, signatures
from crust.host.files.locks import ToolLock, ToolLocks
from crust.host.filesystems import format_decision, fsck, mkfs, superblocks
from crust.host.mounts import device_mounts
from crust.host.process import syscalls, workers


def _vouched(content: ContentRecord, fs_type: str, device: str) -> superblocks.Superblock | None:
    """The superblock of the recorded filesystem, if the device has it: one read."""
    if (content.state, content.fs_type) != ("formatted", fs_type):
        return None
    return superblocks.find(device, fs_type)


def _clear_interrupted(content: ContentRecord, device: str) -> None:
    """Zero what an interrupted mkfs left, but never a complete filesystem, which may have been used."""
    found = signatures.probe_untrusted(device)
    action = format_decision.judge_interrupted(
        content, found, left=lambda fs_type: superblocks.read(device, fs_type)
    )
    if action is format_decision.Action.CLEAR_AND_MAKE:
        devices.zero_device(device)


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a volume's device needs before a mount. The volume is locked for the programs that do it."""

    action: format_decision.Action
    content: ContentRecord
    fs_type: str
    attachment: Attachment
    parameters: Mapping[str, str]
    lock: ToolLock


@dataclass(frozen=True, slots=True)
class FilesystemPreparation:
    """Makes and checks filesystems. The caller makes one call per volume at a time."""

    stores: Stores
    tool_locks: ToolLocks

    def judge(
        self, content: ContentRecord, fs_type: str, attachment: Attachment
    ) -> format_decision.Action | None:
        """The action that the device needs before a mount; none while this host has mounted it: then it was prepared
        before. Anyone else who has it may be a guest, or a tool that a killed driver left running: `DeviceInUse`.
        """
        device = attachment.host_device.path
        hold = devices.try_exclusive(device)
        if hold is None:
            return self._judge_held(content, fs_type, attachment)
        with syscalls.closing(hold):
            found = _vouched(content, fs_type, device)
            if found is None:
                return self._judge_unknown(content, fs_type, device)
            return None if found.clean else format_decision.Action.KEEP

    def _judge_held(
        self, content: ContentRecord, fs_type: str, attachment: Attachment
    ) -> format_decision.Action | None:
        device = attachment.host_device.path
        action = format_decision.Action.KEEP
        if _vouched(content, fs_type, device) is None:
            action = self._judge_unknown(content, fs_type, device)
        if action is format_decision.Action.KEEP and device_mounts.filesystem_mounts(
            attachment.host_device
        ):
            return None
        # raises with the holder, or succeeds if it is free by now
        os.close(devices.open_exclusive(device))
        return action

    def _judge_unknown(
        self, content: ContentRecord, fs_type: str, device: str
    ) -> format_decision.Action:
        """A new volume is not probed while the engine stores no data of it."""
        new = content.state == "new"
        zeros = new and self.stores.access.is_empty(content.volume_id)
        probe = signatures.probe if new and not content.in_guest else signatures.probe_untrusted
        return format_decision.judge(
            content,
            fs_type,
            signatures.Blank() if zeros else probe(device),
            is_blank=lambda: zeros or devices.is_blank(device),
            left=lambda fs_type: superblocks.read(device, fs_type),
        )

    def give_out_raw(self, content: ContentRecord, attachment: Attachment) -> None:
        """Record that a user has the device from here on: this driver never formats it again."""
        if content.state == "raw":
            return
        if content.state == "formatting":
            # Written once more, because a stale record is refused there, before anything is cleared on its word.
            content = self.stores.content_records.save(content)
            _clear_interrupted(content, attachment.host_device.path)
        self.stores.content_records.save(content.but(state="raw", fs_type="", planned_uuid=""))

    async def prepare(self, due: Preparation) -> None:
        """Do what `judge` said; raises the errors of the filesystem's tools, each of which has the volume's lock."""
        device, fs_type, content = due.attachment.host_device.path, due.fs_type, due.content
        with (
            due.lock as lock,
            syscalls.closing(await workers.run(devices.open_shared, device)) as opened,
        ):
            held = (lock.fd, opened)
            if due.action is format_decision.Action.KEEP:
                await fsck.check(device, fs_type, inherits=held)
            elif due.action is format_decision.Action.ADOPT:
                await fsck.check(device, fs_type, completely=True, inherits=held)
                await workers.run(self._adopt, content, device)
            else:
                intended = await workers.run(self._begin, due)
                await self._make(intended, device, mkfs.arguments(fs_type, due.parameters), held)

    async def _make(
        self, intended: ContentRecord, device: str, options: tuple[str, ...], held: tuple[int, ...]
    ) -> None:
        """What is on the device is seen without a look at it if the engine stores no data of the volume at all."""
        is_empty = self.stores.access.is_empty
        await mkfs.make(
            device,
            intended.fs_type,
            uuid=intended.planned_uuid,
            extra_options=options,
            probe=lambda path: (
                signatures.Blank() if is_empty(intended.volume_id) else signatures.probe(path)
            ),
            inherits=held,
        )
        await workers.run(self._formatted, intended)

    def _formatted(self, made: ContentRecord) -> None:
        generation = made.generation + 1
        self.stores.content_records.save(
            made.but(state="formatted", planned_uuid="", generation=generation)
        )

    def _adopt(self, content: ContentRecord, device: str) -> None:
        # The mkfs may have been killed between its last write and its sync.
        devices.sync(device)
        self._formatted(content)

    def _begin(self, due: Preparation) -> ContentRecord:
        """Record the filesystem that is to be made. Nobody was given the device since it was judged."""
        device = due.attachment.host_device
        if not due.attachment.is_new:
            in_use.check_unwritten(device)
        intended = due.content.but(
            state="formatting",
            fs_type=due.fs_type,
            planned_uuid=str(uuid.uuid4()),
            filled_bytes=due.attachment.size_bytes,
        )
        written = self.stores.content_records.save(intended)
        if due.action is format_decision.Action.CLEAR_AND_MAKE:
            devices.zero_device(device.path)
        return written
