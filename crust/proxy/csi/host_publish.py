"""A publish that is not deferred: it passes through as bytes, after a check that it cannot affect a deferred one.

It is no operation of the proxy, which only passes it on: publishes of one volume reach the driver side by side, as
they would without a proxy. It excludes the proxy's operations on the volume and on the target meanwhile.
"""

import grpc.aio

from crust import deferral_keys, errors, operations, volumes
from crust.proxy.csi import policy
from crust.proxy.csi.unpublish import DeferredUnpublish
from crust.proxy.deferrals import reservations
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.driver_calls import STAGED, PublishCall
from crust.rpc import outcome, passthrough
from crust.wire.csi.v1 import csi_pb2

_READER_MODES = frozenset(mode.value for mode in volumes.AccessMode if mode.reader_only)


class HostPublish:
    """NodePublishVolume of one driver, for volumes that are not deferred."""

    def __init__(
        self,
        backend: grpc.aio.Channel,
        deferred: DeferredVolumes,
        unpublish: DeferredUnpublish,
        by_volume: operations.KeyedOperations,
    ) -> None:
        self._forward = passthrough.call(backend, "/csi.v1.Node/NodePublishVolume")
        self._deferred = deferred
        self._unpublish = unpublish
        self._operations = by_volume

    async def run(
        self,
        key: volumes.VolumeKey,
        request: csi_pb2.NodePublishVolumeRequest,
        data: bytes,
        context: passthrough.Context,
        handler: volumes.HandlerName | None,
    ) -> bytes:
        """Publish for a pod whose runtime is `handler`, where that is known; answers with the driver's bytes."""
        target = volumes.TargetPath(request.target_path)  # unchecked: the driver checks it
        with (
            self._operations.shared(key),
            self._deferred.operations.shared(target, "NodePublishVolume"),
        ):
            self._check(key, target, request)
            deferral_keys.check_host_publish(
                request.volume_id,
                request.volume_context,
                is_block=request.volume_capability.HasField("block"),
            )
            if request.volume_capability.HasField("block"):
                self._deferred.raw.passes(target.text)
            call = PublishCall(key, handler, _readonly(request), guarded=False)
            was_staged = self._deferred.has(target)
            try:
                async with self._deferred.driver_calls.publishing(target.text, call):
                    return await self._forward(data, context)
            except grpc.aio.AioRpcError as error:
                if not was_staged and self._deferred.has(target):
                    await self._take_staged_back(key, target, error)
                raise

    async def _take_staged_back(
        self, key: volumes.VolumeKey, target: volumes.TargetPath, error: grpc.aio.AioRpcError
    ) -> None:
        """A driver that staged failed its publish: nothing may stay for which the CO gets a final code."""
        if not outcome.is_final(error):
            return
        try:
            await self._unpublish.remove_staged(key, target)
        except errors.CrustError:
            raise outcome.answer("NodePublishVolume", error, outcome.Residue.EXISTS) from error

    def _check(
        self,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodePublishVolumeRequest,
    ) -> None:
        """Refuse a host mount if a deferred one has the device or the target."""
        if self._is_deferred(target.text, key):
            raise policy.AlreadyDeferred(target.text)
        self._deferred.check_unreserved(
            reservations.Reservation(key, target, None, _readonly(request)), deferred=False
        )

    def _is_deferred(self, target: str, key: volumes.VolumeKey) -> bool:
        """Whether the target is the proxy's. An entry that cannot be read is an error that a CO must not forget.

        What the volume's driver staged itself is the driver's to publish again.
        """
        try:
            record = self._deferred.find(target)
        except errors.CrustError as error:
            raise outcome.answer("NodePublishVolume", error, outcome.Residue.EXISTS) from error
        if record is None:
            return target in self._deferred.unfinished
        is_drivers = record.staged_by_driver and record.key == key
        return not (is_drivers or record.key.driver == STAGED)


def _readonly(request: csi_pb2.NodePublishVolumeRequest) -> bool:
    return request.readonly or request.volume_capability.access_mode.mode in _READER_MODES
