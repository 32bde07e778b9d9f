"""Publishes and unpublishes entries for the Runtime API: staging as in the KEP.

A driver that implements the KEP sends neither a driver name nor a volume id. Its volumes get a driver name of crust's
and a volume id made from the target path, and the proxy identifies the device itself. The driver owns the target, so
the proxy mounts no guard on it.
"""

from crust import errors, operations, volumes
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy import handler_admission
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.devices import Devices
from crust.proxy.handlers import Handlers
from crust.proxy.targets import Targets
from crust.wire.v1 import runtime_pb2, types_pb2

_LIMIT_S = 120.0
DRIVER = volumes.DriverName("runtime-api.crust.dev")


class UnsupportedVolumeType(errors.InvalidRequest):
    """The volume type is not supported: only BLOCK is."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "the volume cannot be published to a runtime",
            why=f"its type is {number}, and only BLOCK (1) is supported",
            hint="send volume_type BLOCK and a block device's path",
        )


class StagedBehindProxy(errors.Refused):
    """A driver publishes a volume to a runtime itself, in a call that came to it through the proxy."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"the volume at {target} cannot be published by RuntimeStageVolume",
            why="the proxy serves the driver's CSI socket, and would not know the volume that the CO names",
            hint="put a crust shim in front of the driver, or let the CO call the driver directly",
        )


class RuntimeStage:
    """Publishes and unpublishes entries by target path."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        handlers: Handlers,
        running: operations.KeyedOperations,
        targets: Targets,
        devices: Devices,
    ) -> None:
        self._deferred = deferred
        self._handlers = handlers
        self._operations = running
        self._targets = targets
        self._devices = devices

    async def stage(self, request: runtime_pb2.RuntimeStageVolumeRequest) -> None:
        """Publish an entry; raises the error of any check."""
        if request.volume_type.type != types_pb2.VolumeType.BLOCK:
            raise UnsupportedVolumeType(request.volume_type.type)
        target = volumes.TargetPath.parse(request.volume_target_path, role="volume_target_path")
        self._targets.check_allowed(target)
        if target.text in self._deferred.passing:
            raise StagedBehindProxy(target.text)
        await self._operations.run(
            target,
            "RuntimeStageVolume",
            request.SerializeToString(deterministic=True),
            lambda: self._stage(target, request),
            limit_s=_LIMIT_S,
        )

    async def unstage(self, target: volumes.TargetPath) -> None:
        """Unpublish an entry; OK if it is absent. Raises `HeldBySandbox`."""
        # checked inside the operation: a stage whose caller has given up may still be creating the entry
        await self._operations.run(
            target,
            "RuntimeUnstageVolume",
            target,
            lambda: self._unpublish(target),
            limit_s=_LIMIT_S,
        )

    async def _stage(
        self, target: volumes.TargetPath, request: runtime_pb2.RuntimeStageVolumeRequest
    ) -> None:
        known = self._deferred.find(target.text)
        # a retry keeps the first choice: a second handler may have registered since
        handler = await self._handlers.choose(known.handler if known is not None else None)
        mount = await workers.run(self._mount_of, request)
        record = Record.of(mount, _key(target), target, handler.name)
        handler_admission.check(
            handler, fs_type=mount.fs_type, group=mount.group, readonly=record.readonly
        )
        shared = await workers.run(self._devices.device_set, record.identity)
        with self._deferred.reserved(record, shared):
            published = await workers.run(self._publish, record, shared, is_new=known is None)
            self._deferred.remember(published, shared)

    def _publish(self, record: Record, shared: DeviceSet, *, is_new: bool) -> Record:
        if is_new:
            self._deferred.raw.check(record.mount.source, shared, readonly=record.readonly)
        self._targets.check_unmounted(record.mount.source, readonly=record.readonly, probe=is_new)
        return self._deferred.publish(record)

    async def _unpublish(self, target: volumes.TargetPath) -> None:
        record = self._deferred.find(target.text)
        if record is None:
            return
        self._deferred.check_key(record, _key(target))
        entry = await workers.run(self._deferred.store.begin_unpublish, target)
        try:
            await workers.run(entry.complete)
        finally:
            await workers.run(entry.close)
        self._deferred.forget(target)

    def _mount_of(self, request: runtime_pb2.RuntimeStageVolumeRequest) -> volumes.DeferredMount:
        device = volumes.TargetPath.parse(request.volume_backing_path, role="volume_backing_path")
        return volumes.DeferredMount(
            source=volumes.BlockSource(device.text, self._devices.identify(device.text)),
            fs_type=request.fs_type,
            mount_options=tuple(request.mount_flags),
            group=_group_of(request),
            capacity_bytes=self._devices.size_bytes(device.text),
        )


def _key(target: volumes.TargetPath) -> volumes.VolumeKey:
    return volumes.VolumeKey(DRIVER, volumes.VolumeId(target.digest))


def _group_of(request: runtime_pb2.RuntimeStageVolumeRequest) -> volumes.GroupChange | None:
    group = request.volume_supplemental_group
    number = request.volume_supplemental_group_change_policy.policy
    if number and not group:
        raise errors.InvalidRequest(
            "volume_supplemental_group_change_policy is set without volume_supplemental_group"
        )
    if number == types_pb2.VolumeGroupChangePolicy.ALWAYS:
        return volumes.GroupChange.parse(group, volumes.GroupPolicy.ALWAYS)
    return volumes.GroupChange.parse(group) if group else None
