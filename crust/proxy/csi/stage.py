"""Publishes and unpublishes entries for the Runtime API: staging as in the KEP.

A driver that implements the KEP sends neither a driver name nor a volume id, and the proxy identifies the device
itself. If the proxy serves the driver's CSI socket, the CO's call says whose volume it is (`DriverCalls`): the entry
gets the CO's key and a guard mount, and is the CO's to unpublish. Otherwise the volume gets a driver name of crust's
and a volume id made from the target path; the driver owns the target, and the proxy mounts no guard on it.

The entry comes before the guard: what is killed in between is an entry, whose guard the next look restores.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from crust import errors, operations, volumes
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.devices import Devices
from crust.proxy.deferrals.driver_calls import STAGED, PublishCall
from crust.proxy.deferrals.targets import Targets
from crust.proxy.runtimes import handler_admission
from crust.proxy.runtimes.handlers import Handlers
from crust.wire.v1 import runtime_pb2, types_pb2

_LIMIT_S = 120.0


class UnsupportedVolumeType(errors.InvalidRequest):
    """The volume type is not supported: only BLOCK is."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "the volume cannot be published to a runtime",
            why=f"its type is {number}, and only BLOCK (1) is supported",
            hint="send volume_type BLOCK and a block device's path",
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
        calls = self._deferred.driver_calls
        call = calls.publish_at(target.text)
        # the CO's call holds the target: what its driver does meanwhile is a part of it
        key = target if call is None else (target, call)
        await self._operations.run(
            key,
            "RuntimeStageVolume",
            request.SerializeToString(deterministic=True),
            lambda: self._within(
                call, lambda: self._stage(target, request, call or calls.abandoned_at(target.text))
            ),
            limit_s=_LIMIT_S,
        )

    async def unstage(self, target: volumes.TargetPath) -> None:
        """Unpublish an entry; OK if it is absent. Raises `HeldBySandbox`.

        In an unpublish of the CO the proxy removes the entry itself, when the driver has answered.
        """
        calls = self._deferred.driver_calls
        if calls.is_unpublishing(target.text):
            return
        call = calls.publish_at(target.text)
        key = target if call is None else (target, call)
        # checked inside the operation: a stage whose caller has given up may still be creating the entry
        await self._operations.run(
            key,
            "RuntimeUnstageVolume",
            target,
            lambda: self._within(call, lambda: self._unpublish(target, call)),
            limit_s=_LIMIT_S,
        )

    async def _within(self, call: PublishCall | None, work: Callable[[], Awaitable[None]]) -> None:
        if call is None:
            return await work()
        with call.staging():
            return await work()

    async def _stage(
        self,
        target: volumes.TargetPath,
        request: runtime_pb2.RuntimeStageVolumeRequest,
        call: PublishCall | None,
    ) -> None:
        known = self._deferred.find(target.text)
        # a retry keeps the first choice: a second handler may have registered since
        if known is not None and call is not None and known.key.driver == STAGED:
            # staged when nobody knew any more whose it was, e.g. after a restart
            await self._remove(target)
            known = None
        named = call.handler if call is not None else None
        handler = await self._handlers.choose(known.handler if known is not None else named)
        mount = await workers.run(self._mount_of, request)
        if call is None:
            key = known.key if known is not None and known.staged_by_driver else _key(target)
        else:
            key, mount = call.key, replace(mount, readonly=mount.readonly or call.readonly)
        record = Record.of(mount, key, target, handler.name, staged_by_driver=key.driver != STAGED)
        handler_admission.check(
            handler, fs_type=mount.fs_type, group=mount.group, readonly=record.readonly
        )
        shared = await workers.run(self._devices.device_set, record.identity)
        with self._deferred.reserved(record, shared):
            published = await workers.run(self._publish, record, shared, is_new=known is None)
            self._deferred.remember(published, shared)
        if record.staged_by_driver:
            await self._guard(target)

    async def _guard(self, target: volumes.TargetPath) -> None:
        try:
            await workers.run(self._targets.mount_guard, target)
        except errors.CrustError:
            await self._remove(target)
            raise

    def _publish(self, record: Record, shared: DeviceSet, *, is_new: bool) -> Record:
        if is_new:
            self._deferred.raw.check(record.block, shared, readonly=record.readonly)
        self._targets.check_unmounted(record.block, readonly=record.readonly, probe=is_new)
        return self._deferred.publish(record)

    async def _unpublish(self, target: volumes.TargetPath, call: PublishCall | None) -> None:
        record = self._deferred.find(target.text)
        if record is None:
            return
        if not record.staged_by_driver:
            self._deferred.check_key(record, _key(target))
        await self._remove(target)
        if record.staged_by_driver and (call is None or not call.guarded):
            await workers.run(self._targets.unmount_guard, target)

    async def _remove(self, target: volumes.TargetPath) -> None:
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
    return volumes.VolumeKey(STAGED, volumes.VolumeId(target.digest))


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
