"""NodePublishVolume on the host, beside deferred publishes: the request passes as bytes.

It is no operation of the proxy: publishes of one volume reach the driver side by side, as without a proxy.
The proxy verifies the device after the driver's answer: a deferred publish may have it under another volume's id. A
deferred publish reserves its device first, and then asks the kernel for its users, so one of both sees the other.
"""

import logging
from dataclasses import dataclass, replace

from crust.core import deferral_keys, errors, volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy.guard import devices_at
from crust.proxy.publish import Publish
from crust.proxy.table import Entries
from crust.proxy.target import TargetRow, request_digest, residue_beside
from crust.rpc.call import Metadata
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver
from crust.rpc.messages import csi
from crust.rpc.status import Residue
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostPublish:
    """Checks publishes on the host; `publish` words their refusals."""

    entries: Entries
    publish: Publish

    async def begin(
        self, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest
    ) -> tuple[TargetRow, bool]:
        """Check that no deferred publish forbids a publish on the host, which reaches the driver now.

        Returns its row, which is in no table, and whether the target is new.
        """
        is_new = await workers.run(self._is_free, key, request)
        path = request.target_path  # unchecked: the driver checks it
        present = self.entries.table.at(path)
        if present is not None:
            if present.entry is not None and present.entry.error is not None:
                raise self.publish.refuse(path, present.entry.error)
            error = errors.Conflict.named(
                "AlreadyDeferred",
                f"the volume cannot be mounted at {path}",
                why="it is published there already, to a runtime",
            )
            residue = residue_beside(present.record, request_digest(request))
            raise self.publish.refuse(path, error, residue)
        row = TargetRow.of(path, key=key, readonly=csi.is_readonly(request))
        self.entries.table.check_reservation(row, deferred=False)
        is_block = request.volume_capability.HasField("block")
        format_in = deferral_keys.strictest_format_in(request.volume_context)
        deferral_keys.check_host_publish(request.volume_id, format_in, is_block=is_block)
        return row, is_new

    def _is_free(self, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest) -> bool:
        """Whether no device is published at the path. Raises `VolumeInUseByTool`."""
        self.entries.filesystems.locks.check_free(str(key))
        try:
            return self._devices(request) is None
        except errors.CrustError:  # the driver answers for such a path, and nothing is undone there
            return False

    async def check_device(
        self,
        row: TargetRow,
        request: csi_pb2.NodePublishVolumeRequest,
        backend: CsiDriver,
        metadata: Metadata,
        *,
        is_new: bool,
    ) -> None:
        """Verify the published device; raises DeviceReserved, after the undo of a publish that `is_new`."""
        try:
            devices = await workers.run(self._devices, request)
            self.entries.table.check_reservation(replace(row, devices=devices), deferred=False)
        except Exception as error:
            residue = await self._undo(row, backend, metadata) if is_new else Residue.EXISTS
            raise self.publish.refuse(row.path, error, residue) from error

    def _devices(self, request: csi_pb2.NodePublishVolumeRequest) -> DeviceSet | None:
        """The device at the target, raw or mounted. Blocks."""
        path: str | None = request.target_path
        if not request.volume_capability.HasField("block"):
            path = self.entries.targets.mounted_device(request.target_path)
        return None if path is None else devices_at(self.entries.devices, path)

    async def _undo(self, row: TargetRow, backend: CsiDriver, metadata: Metadata) -> Residue:
        assert row.key is not None
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=row.key.volume_id, target_path=row.path
        )
        try:
            await backend.node.NodeUnpublishVolume(
                request, metadata=metadata, timeout=CHANGE_TIMEOUT_S
            )
        except Exception as failure:
            extra = {"target": row.path, "error": failure}
            _log.warning("publish on the host not undone", extra=extra)
            return Residue.EXISTS
        return Residue.NONE
