"""A publish that is not deferred: it passes through as bytes, after a check that it cannot affect a deferred one.

It is no operation of the proxy, which only passes it on: publishes of one volume reach the driver side by side, as
they would without a proxy. It excludes the proxy's operations on the volume and on the target meanwhile.
"""

import grpc.aio

from crust import deferral_keys, errors, volumes
from crust.proxy.csi import policy
from crust.proxy.deferrals import reservations
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.rpc import outcome, passthrough
from crust.wire.csi.v1 import csi_pb2

_READER_MODES = frozenset(mode.value for mode in volumes.AccessMode if mode.reader_only)


class HostPublish:
    """NodePublishVolume of one driver, for volumes that are not deferred."""

    def __init__(
        self,
        backend: grpc.aio.Channel,
        deferred: DeferredVolumes,
    ) -> None:
        self._forward = passthrough.call(backend, "/csi.v1.Node/NodePublishVolume")
        self._deferred = deferred
        self._operations = deferred.operations

    async def run(
        self,
        key: volumes.VolumeKey,
        request: csi_pb2.NodePublishVolumeRequest,
        data: bytes,
        context: passthrough.Context,
    ) -> bytes:
        """Publish; answers with the driver's bytes."""
        target = volumes.TargetPath(request.target_path)  # unchecked: the driver checks it
        with (
            self._operations.shared(key),
            self._operations.shared(target, "NodePublishVolume"),
        ):
            self._check(key, target, request)
            deferral_keys.check_host_publish(
                request.volume_id,
                request.volume_context,
                is_block=request.volume_capability.HasField("block"),
            )
            if request.volume_capability.HasField("block"):
                self._deferred.raw.passes(target.text)
            return await self._forward(data, context)

    def _check(
        self,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodePublishVolumeRequest,
    ) -> None:
        """Refuse a host mount if a deferred one has the device or the target."""
        if self._is_deferred(target.text):
            raise policy.AlreadyDeferred(target.text)
        self._deferred.check_unreserved(
            reservations.Reservation(key, target, None, _readonly(request)), deferred=False
        )

    def _is_deferred(self, target: str) -> bool:
        """Whether the target is the proxy's. An entry that cannot be read is an error that a CO must not forget."""
        try:
            record = self._deferred.find(target)
        except errors.CrustError as error:
            raise outcome.answer("NodePublishVolume", error, outcome.Residue.EXISTS) from error
        return record is not None or target in self._deferred.unfinished


def _readonly(request: csi_pb2.NodePublishVolumeRequest) -> bool:
    return request.readonly or request.volume_capability.access_mode.mode in _READER_MODES
