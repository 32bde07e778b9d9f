"""The device of a volume that was staged for hypervisors, mapped at its first publish on this host.

Only the publish tells whether the host or a guest mounts a volume. If the engine can give either (images in Ceph),
the stage attaches for a hypervisor. Before the first publish on the host this module makes a device, and prepares its
filesystem as a stage does for other engines. It notes "prepared" last, so the next publish completes an interrupted
one. A publish to a guest, without a mount here, gives the device back first: the image has one client.

A reader's device takes no writes, so the driver neither makes nor repairs a filesystem on it.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from crust.blockdriver.engines.pool_access import Access, NoHostDevice
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_stage import FilesystemPreparation, Preparation
from crust.blockdriver.node.publish.publish_rules import AdmittedPublish, Publish
from crust.blockdriver.records.stores import Stores
from crust.core import volumes


@dataclass(frozen=True, slots=True)
class HostImage:
    """Moves a volume between this host and hypervisors. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    preparation: FilesystemPreparation

    def make_ready(self, admitted: AdmittedPublish) -> Preparation | None:
        """Give a volume that was staged for hypervisors its device. Returns the preparation before a mount, if any;
        the caller does it, and checks the publish again in any case.

        Raises the engine's `NoHostDevice` and others, `VolumeInUseByTool`, and the errors of
        `FilesystemPreparation.begin`.
        """
        request = admitted.request
        with ExitStack() as descriptors:
            lock = descriptors.enter_context(self.preparation.tool_locks.taking(request.volume_id))
            access = _access(request, on_host=True)
            attachment = self.stores.access.attach(request.volume_id, access)
            if attachment.device is None:
                raise NoHostDevice()
            self.io_limits.settle(admitted.record.limits.value, attachment)
            note_prepared = partial(self._note, request.volume_id, "prepared")
            preparation = Preparation(
                admitted.content,
                admitted.staged.fs_type,
                attachment,
                admitted.record.parameters,
                note_prepared,
                inherits=(lock,),
            )
            due = self.preparation.begin(
                preparation, descriptors, readonly=request.capability.mode.reader_only
            )
            if due is None:
                note_prepared()
            return due

    def give_back(self, admitted: AdmittedPublish) -> bool:
        """Before a publish to a guest: attach the volume for a hypervisor again, unless this host has it mounted.
        Returns whether it had a device until now: then check the publish again.
        """
        volume_id, is_mapped = admitted.request.volume_id, admitted.attachment.device is not None
        if not is_mapped or not all(publish.deferred for publish in admitted.others):
            return False
        with self.io_limits.released(admitted.attachment):
            self.stores.access.attach(volume_id, _access(admitted.request, on_host=False))
        self._note(volume_id, "image")
        return True

    def _note(self, volume_id: volumes.VolumeId, host: Literal["image", "prepared"]) -> None:
        staged = self.stores.node_state.of(volume_id).stage
        assert staged is not None, "it was checked, and its key is held"
        self.stores.node_state.note_staged(staged.model_copy(update={"host": host}))


def _access(request: Publish, *, on_host: bool) -> Access:
    mode = request.capability.mode
    return Access(mode, readonly=mode.reader_only, on_host=on_host, secrets=request.secrets)
