"""A volume with a filesystem, staged for hypervisors, is published on this host itself: it is mapped now, not before.

Only the publish tells whether the host or a guest mounts a volume. Where the engine can give either (images in Ceph),
the stage attaches for a hypervisor, and this comes before the first publish on the host: a device, and the same
preparation of its filesystem that a stage does for other engines. "prepared" is noted last, so a crash on the way is
completed by the next publish, by the content record. A publish to a guest, while nothing is mounted here, gives the
device back first: the image has one client.

A reader's device takes no writes, so nothing is made or repaired on it.
"""

from contextlib import ExitStack
from dataclasses import dataclass

from crust.blockdriver.engines.node_access import Access, NoHostDevice
from crust.blockdriver.node.filesystems.filesystem_preparation import FilesystemPreparation
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.publish.publish_rules import Publish, PublishCheck, Ready
from crust.blockdriver.records.node_state import Staged
from crust.blockdriver.records.stores import Stores
from crust.host.files.locks import ToolLock
from crust.host.filesystems import format_decision
from crust.host.process import workers


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the filesystem of a mapped volume needs; the volume is locked for the programs."""

    ready: Ready
    staged: Staged
    action: format_decision.Action
    lock: ToolLock


@dataclass(frozen=True, slots=True)
class HostImage:
    """Moves a volume between this host and hypervisors. The caller makes one call per volume at a time."""

    stores: Stores
    publish_check: PublishCheck
    io_limits: IoLimits
    preparation: FilesystemPreparation

    def make_ready(self, request: Publish) -> Preparation | None:
        """Give a volume that was staged for hypervisors its device; nothing for any other one. Returns what the
        filesystem needs before a mount: `prepare` it then, and call again.

        Raises what `PublishCheck.check` raises, the engine's `NoHostDevice` and others,
        `VolumeInUseByTool`, the errors of `format_decision.judge`, and `ReadOnlyVolumeNotFormatted`.
        """
        staged = self.stores.node_state.staged(request.volume_id)
        if staged is None or not staged.host:
            return None
        access = self.stores.access
        if staged.host == "prepared" and access.host_device(request.volume_id) is not None:
            return None
        ready = self.publish_check.check(request)
        with ExitStack() as held:
            lock = held.enter_context(self.preparation.tool_locks.take(request.volume_id))
            ready = self._mapped(request, ready)
            action = self.preparation.judge(ready.content, staged.fs_type, ready.attachment)
            if request.capability.mode.reader_only:
                format_decision.check_readable(request.volume_id, action)
                action = None
            if action is None:
                self._note(staged, "prepared")
                return None
            held.pop_all()  # the programs that prepare it inherit the lock
        return Preparation(ready, staged, action, lock)

    async def prepare(self, begun: Preparation) -> None:
        """Run the filesystem's tools. Raises their errors."""
        ready = begun.ready
        with begun.lock as lock:
            await self.preparation.prepare(
                begun.action,
                ready.content,
                begun.staged,
                ready.attachment,
                ready.record.parameters,
                lock,
            )
        await workers.run(self._note, begun.staged, "prepared")

    def give_back(self, request: Publish) -> None:
        """Before a publish to a guest: attach the volume for a hypervisor again, unless this host has it mounted."""
        staged = self.stores.node_state.staged(request.volume_id)
        if staged is None or not staged.host:
            return
        attachment = self.stores.access.host_device(request.volume_id)
        if attachment is None:
            return
        if any(
            not each.deferred for each in self.stores.node_state.live_publishes(request.volume_id)
        ):
            return
        self.stores.access.use(request.volume_id, request.secrets)
        with self.io_limits.released(attachment):
            self.stores.access.attach(request.volume_id, _access(request, on_host=False))
        self._note(staged, "image")

    def _mapped(self, request: Publish, ready: Ready) -> Ready:
        access = self.stores.access
        attachment = access.attach(request.volume_id, _access(request, on_host=True))
        if attachment.device is None:
            raise NoHostDevice()
        self.io_limits.settle(ready.record.limits.value, attachment)
        return ready.on(attachment)

    def _note(self, staged: Staged, host: str) -> None:
        self.stores.node_state.note_staged(staged.model_copy(update={"host": host}))


def _access(request: Publish, *, on_host: bool) -> Access:
    mode = request.capability.mode
    return Access(mode, readonly=mode.reader_only, on_host=on_host, secrets=request.secrets)
