"""NodePublishVolume on the host, beside deferred publishes: the request passes as bytes.

It is no operation of the proxy: publishes of one volume reach the driver side by side, as without a proxy.
The proxy verifies the device after the driver's answer: a deferred publish may have it under another volume's id. A
bind mount of a device's node does not hold the device, so a raw publish is a row of the table.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from crust.core import deferral_keys, errors, volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.process import syscalls, workers
from crust.proxy.guard import devices_at
from crust.proxy.publish import Publish
from crust.proxy.table import Entries
from crust.proxy.target import Target, request_digest, residue_beside
from crust.rpc.call import Metadata
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver
from crust.rpc.status import Residue
from crust.wire.csi.v1 import csi_pb2

_KUBELETS_RAW = "plugins/kubernetes.io/csi/volumeDevices/publish"
"""Below a kubelet's root: `<name of the PV>/<UID of the pod>`."""

_READER_MODES = frozenset(mode.value for mode in volumes.AccessMode if mode.reader_only)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostPublish:
    """Checks publishes on the host; `publish` words their refusals."""

    entries: Entries
    publish: Publish

    async def begin(
        self, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest
    ) -> tuple[Target, bool]:
        """Note that a publish on the host reaches the driver now; returns its row, and whether the target is new.

        From now on looks include the target of a raw publish. Raises if a deferred publish forbids it.
        """
        is_free = await workers.run(self._is_free, key, request.target_path)
        row = self._admit(key, request)
        if not row.raw:
            return row, is_free
        is_new = self.entries.table.at(row.path) is None
        if is_new:  # a repeat that the driver refuses changes nothing
            self.entries.table.put(row)
        return row, is_new

    def _is_free(self, key: volumes.VolumeKey, path: str) -> bool:
        """Whether no device is mounted at the path. Raises `VolumeInUseByTool`."""
        self.entries.filesystems.locks.check_free(str(key))
        try:
            return self.entries.targets.mounted_device(path) is None
        except errors.CrustError:  # the driver answers for such a path, and nothing is undone there
            return False

    def _admit(self, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest) -> Target:
        path = request.target_path  # unchecked: the driver checks it
        is_block = request.volume_capability.HasField("block")
        present = self.entries.table.at(path)
        if present is not None and not present.raw:
            if present.entry is not None and present.entry.error is not None:
                raise self.publish.refusal(path, present.entry.error)
            error = errors.Conflict.named(
                "AlreadyDeferred",
                f"the volume cannot be mounted at {path}",
                why="it is published there already, to a runtime",
                hint="unpublish it first; a publish never switches from one to the other",
            )
            residue = residue_beside(present.record, request_digest(request))
            raise self.publish.answer(path, error, residue, None)
        mode = request.volume_capability.access_mode.mode
        readonly = request.readonly or mode in _READER_MODES
        row = Target.of(path, key=key, readonly=readonly, raw=is_block)
        self.entries.table.check_reservation(row, deferred=False)
        deferral_keys.check_host_publish(
            request.volume_id, request.volume_context, is_block=is_block
        )
        return row

    def ended(self, path: str) -> None:
        """Note that the driver has unpublished the target."""
        row = self.entries.table.at(path)
        if row is not None and row.raw:
            self.entries.table.drop(row.name)

    async def check_device(
        self, row: Target, backend: CsiDriver, metadata: Metadata, *, is_new: bool
    ) -> None:
        """Verify the published device; raises DeviceReserved, after the undo of a publish that `is_new`."""
        try:
            devices = await workers.run(self._devices, row)
            self.entries.table.check_reservation(replace(row, devices=devices), deferred=False)
        except Exception as error:
            is_undone = is_new and await self._undo(row, backend, metadata)
            residue = Residue.NONE if is_undone else Residue.EXISTS
            raise self.publish.answer(row.path, error, residue, None) from error

    def _devices(self, row: Target) -> DeviceSet | None:
        path = row.path if row.raw else self.entries.targets.mounted_device(row.path)
        return None if path is None else devices_at(self.entries.devices, path)

    async def _undo(self, row: Target, backend: CsiDriver, metadata: Metadata) -> bool:
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
            return False
        self.ended(row.path)
        return True


def raw_targets(roots: Iterable[str]) -> list[str]:
    """The targets of the raw publishes of an earlier process, below the roots of kubelets. Blocks.

    Raises `CrustError` for a directory that cannot be read.
    """
    with syscalls.translating("cannot list the raw volumes of a kubelet"):
        bases = (f"{root}/{_KUBELETS_RAW}" for root in roots)
        volumes_of = (f"{base}/{pv}" for base in bases for pv in syscalls.names_in(base))
        paths = (f"{of}/{uid}" for of in volumes_of for uid in syscalls.names_in(of))
        return [path for path in paths if not volumes.is_private(path)]
