"""What a stage does to a device so that it can be mounted: nothing, a check, or a new filesystem.

The content record comes first, always: "formatting" is durable before mkfs runs, "raw" before a user has the device.
A record that somebody else wrote meanwhile is refused there (`RecordChanged`), so nothing is made or cleared on
the word of a stale one.

Each program that runs has the volume's lock (`crust.host.files.locks`) and the open device.
"""

import functools
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crust.blockdriver.engines.node_access import Attachment
from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.node_state import Staged
from crust.blockdriver.records.stores import Stores
from crust.host.block import devices, in_use, signatures
from crust.host.files.locks import ToolLock, ToolLocks
from crust.host.filesystems import format_decision, fsck, mkfs, superblocks
from crust.host.mounts import device_mounts
from crust.host.process import workers


def _judge(
    content: ContentRecord,
    fs_type: str,
    attachment: Attachment,
    is_empty: Callable[[], bool],
) -> format_decision.Action | None:
    """The action that the device needs; none while this host has mounted it: then it was prepared before.

    `is_empty` asks the engine whether it stores any data of the volume: if not, a new one is not probed.
    Anyone else who has it may be a guest, or a tool that a killed driver left running: `DeviceInUse`.
    """
    device = attachment.host_device.path
    hold = devices.try_exclusive(device)
    if hold is None:
        return _judge_held(content, fs_type, attachment, is_empty)
    try:
        found = _vouched(content, fs_type, device)
        if found is None:
            return _judge_unknown(content, fs_type, device, is_empty)
        return None if found.clean else format_decision.Action.KEEP
    finally:
        os.close(hold)


def _judge_held(
    content: ContentRecord,
    fs_type: str,
    attachment: Attachment,
    is_empty: Callable[[], bool],
) -> format_decision.Action | None:
    device = attachment.host_device.path
    action = format_decision.Action.KEEP
    if _vouched(content, fs_type, device) is None:
        action = _judge_unknown(content, fs_type, device, is_empty)
    if action is format_decision.Action.KEEP and device_mounts.filesystem_mounts(
        attachment.host_device
    ):
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


def _judge_unknown(
    content: ContentRecord, fs_type: str, device: str, is_empty: Callable[[], bool]
) -> format_decision.Action:
    new = content.state == "new"
    zeros = new and is_empty()
    probe = signatures.probe if new and not content.in_guest else signatures.probe_untrusted
    return format_decision.judge(
        content,
        fs_type,
        signatures.Blank() if zeros else probe(device),
        is_blank=lambda: zeros or devices.is_blank(device),
        left=lambda fs_type: superblocks.read(device, fs_type),
    )


def _clear_interrupted(content: ContentRecord, device: str) -> None:
    """Zero what an interrupted mkfs left, but never a complete filesystem, which may have been used."""
    found = signatures.probe_untrusted(device)
    action = format_decision.judge_interrupted(
        content, found, left=lambda fs_type: superblocks.read(device, fs_type)
    )
    if action is format_decision.Action.CLEAR_AND_MAKE:
        devices.zero_device(device)


@dataclass(frozen=True, slots=True)
class FilesystemPreparation:
    """Makes and checks filesystems. The caller makes one call per volume at a time."""

    stores: Stores
    tool_locks: ToolLocks

    def judge(
        self, content: ContentRecord, fs_type: str, attachment: Attachment
    ) -> format_decision.Action | None:
        """The action that the device needs before a mount."""
        return _judge(content, fs_type, attachment, self._is_empty(content))

    def give_out_raw(self, content: ContentRecord, attachment: Attachment) -> None:
        """Record that a user has the device from here on: this driver never formats it again."""
        if content.state == "raw":
            return
        if content.state == "formatting":
            # Written once more, because a stale record is refused there, before anything is cleared on its word.
            content = self.stores.content_records.save(content)
            _clear_interrupted(content, attachment.host_device.path)
        self.stores.content_records.save(content.but(state="raw", fs_type="", planned_uuid=""))

    async def prepare(
        self,
        action: format_decision.Action,
        content: ContentRecord,
        entry: Staged,
        attachment: Attachment,
        parameters: Mapping[str, str],
        lock: ToolLock,
    ) -> None:
        """Do what `judge` said; raises the errors of the filesystem's tools, each of which has the volume's lock."""
        device = await workers.run(devices.open_shared, attachment.host_device.path)
        try:
            held = (lock.fd, device)
            await self._prepare(action, content, entry, attachment, parameters, held)
        finally:
            os.close(device)

    async def _prepare(
        self,
        action: format_decision.Action,
        content: ContentRecord,
        entry: Staged,
        attachment: Attachment,
        parameters: Mapping[str, str],
        held: tuple[int, ...],
    ) -> None:
        device, fs_type = attachment.host_device.path, entry.fs_type
        if action is format_decision.Action.KEEP:
            await fsck.check(device, fs_type, inherits=held)
            return
        if action is format_decision.Action.ADOPT:
            await fsck.check(device, fs_type, completely=True, inherits=held)
            await workers.run(self._adopt, content, device)
            return
        intended = content.but(
            state="formatting",
            fs_type=fs_type,
            planned_uuid=str(uuid.uuid4()),
            filled_bytes=attachment.size_bytes,
        )
        clear = action is format_decision.Action.CLEAR_AND_MAKE
        if not attachment.is_new:
            await workers.run(in_use.check_unwritten, attachment.host_device)
        intended = await workers.run(self._begin, intended, device, clear=clear)
        options = mkfs.arguments(fs_type, parameters)
        await mkfs.make(
            device,
            fs_type,
            uuid=intended.planned_uuid,
            extra_options=options,
            probe=self._probe(content),
            inherits=held,
        )
        await workers.run(self._formatted, intended)

    def _is_empty(self, content: ContentRecord) -> Callable[[], bool]:
        return functools.partial(self.stores.access.is_empty, content.volume_id)

    def _probe(self, content: ContentRecord) -> Callable[[str], signatures.Signature]:
        """What is on the device; without a look at it if the engine stores no data of the volume at all."""
        is_empty = self._is_empty(content)
        return lambda path: signatures.Blank() if is_empty() else signatures.probe(path)

    def _formatted(self, made: ContentRecord) -> None:
        generation = made.generation + 1
        self.stores.content_records.save(
            made.but(state="formatted", planned_uuid="", generation=generation)
        )

    def _adopt(self, content: ContentRecord, device: str) -> None:
        # The mkfs may have been killed between its last write and its sync.
        devices.sync(device)
        self._formatted(content)

    def _begin(self, intended: ContentRecord, device: str, *, clear: bool) -> ContentRecord:
        written = self.stores.content_records.save(intended)
        if clear:
            devices.zero_device(device)
        return written
