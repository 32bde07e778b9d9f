"""The shim beside a vendor's controller: between the CSI sidecars and the driver's controller socket.

It looks at six calls; every other call passes byte for byte. The context of each volume that it creates has keys of
crust: `crust.dev/defer: never` if its class has none, so that no node's default defers a volume that was not created
for it. The shim keeps no state: a later call has the keys in its volume context, or passes byte for byte.

ControllerExpandVolume has no volume context. Unless the CO says that the volume is raw, a filesystem must grow, and
the controller cannot know whether it has: so the shim sets `node_expansion_required`. For a volume that the host
mounts, this is one call more to the node's driver, and changes nothing: the node's shim answers for a driver without
NodeExpandVolume.

It refuses ControllerUnpublishVolume of a deferred volume unless it knows that no node uses it: a detach by force
would take the device from a guest that writes to it.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from google.protobuf.message import Message

from crust.core import deferral_keys, errors
from crust.csi_shim.controller import created_volume
from crust.csi_shim.settings import DetachAccess, ShimSettings
from crust.host.process import workers
from crust.kubernetes_api import api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from crust.rpc.call import Call
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import SocketPort, stub
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.service import Methods, Service, csi_methods
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_Own = Callable[[Any, Call], Awaitable[Message | None]]
"""The answer of the shim itself, None if the call passes."""


class ControllerShim:
    """Answers the calls; without `users` every detach passes.

    `driver_name` is the CO's name of the driver; without it, the driver's own.
    """

    def __init__(
        self, driver: CsiDriver, users: VolumesInUse | None = None, driver_name: str = ""
    ) -> None:
        self._users = users
        self._driver_name = driver_name
        self._driver = driver
        self._stub = stub(csi_pb2_grpc.ControllerStub, driver.port)

    def methods(self) -> Methods:
        methods: dict[str, _Own] = {
            "CreateVolume": self._create,
            "GetCapacity": self._capacity,
            "ControllerPublishVolume": self._publish,
            "ControllerUnpublishVolume": self._unpublish,
            "ValidateVolumeCapabilities": self._validate,
            "ControllerExpandVolume": self._expand,
        }
        return csi_methods(
            "Controller", {name: partial(self._or_pass, method) for name, method in methods.items()}
        )

    async def _or_pass(self, method: _Own, request: Message, data: bytes, call: Call) -> bytes:
        response = await method(request, call)
        if response is None:
            return await self._driver.port.forward(call, data)
        return response.SerializeToString()

    async def _create(self, request: csi_pb2.CreateVolumeRequest, call: Call) -> Message | None:
        keys = created_volume.class_keys(request.parameters)
        sent = created_volume.to_driver(request, keys, await self._name(call))
        answer = await self._stub.CreateVolume(sent, **call.onward())
        answer.volume.volume_context.update(created_volume.context_of(request, answer, keys))
        return answer

    async def _capacity(self, request: csi_pb2.GetCapacityRequest, call: Call) -> Message | None:
        """The capacity for volumes of a StorageClass, with the parameters that its CreateVolume would have."""
        if not created_volume.has_keys(request.parameters):
            return None
        if created_volume.is_block(request.parameters):
            created_volume.as_block(request.volume_capabilities)
        deferral_keys.remove(request.parameters)
        return await self._stub.GetCapacity(request, **call.onward())

    async def _publish(
        self, request: csi_pb2.ControllerPublishVolumeRequest, call: Call
    ) -> Message | None:
        if not created_volume.has_keys(request.volume_context):
            return None
        if created_volume.is_block(request.volume_context):
            created_volume.as_block([request.volume_capability])
        deferral_keys.remove(request.volume_context)
        return await self._stub.ControllerPublishVolume(request, **call.onward())

    async def _unpublish(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, call: Call
    ) -> Message | None:
        if self._users is not None:
            driver = await self._name(call)
            await self._users.check_detach(driver, request.volume_id, request.node_id)
        return None

    async def _name(self, call: Call) -> str:
        return self._driver_name or await self._driver.name(call.time_remaining())

    async def _validate(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> Message | None:
        if not (
            created_volume.has_keys(request.volume_context)
            or created_volume.has_keys(request.parameters)
        ):
            return None
        is_deferred = created_volume.is_block(request.volume_context)
        sent = csi_pb2.ValidateVolumeCapabilitiesRequest()
        sent.CopyFrom(request)
        deferral_keys.remove(sent.volume_context)
        deferral_keys.remove(sent.parameters)
        if is_deferred:
            created_volume.as_block(sent.volume_capabilities)
        answer = await self._stub.ValidateVolumeCapabilities(sent, **call.onward())
        if answer.HasField("confirmed"):  # confirm the CO's request, and not the driver's
            answer.confirmed.volume_context.update(request.volume_context)
            answer.confirmed.parameters.update(request.parameters)
            if is_deferred and answer.confirmed.volume_capabilities:
                answer.confirmed.ClearField("volume_capabilities")
                answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
        return answer

    async def _expand(
        self, request: csi_pb2.ControllerExpandVolumeRequest, call: Call
    ) -> Message | None:
        if request.volume_capability.HasField("block"):
            return None
        answer = await self._stub.ControllerExpandVolume(request, **call.onward())
        answer.node_expansion_required = True
        return answer


@asynccontextmanager
async def part(
    settings: ShimSettings, daemon: Daemon, users: VolumesInUse | None
) -> AsyncIterator[None]:
    """Serve as the process `daemon` while the block runs; `users` comes from `users_of`."""
    async with (
        SocketPort(settings.driver_socket) as port,
        contextlib.aclosing(CsiDriver(port)) as driver,
    ):
        shim = ControllerShim(driver, users, settings.driver_name)
        service = Service(
            "controller shim",
            shim.methods(),
            others=port,
            health=daemon.health,
            driver=driver.known_name,
        )
        following = users.following(daemon.health) if users is not None else nullcontext()
        async with following, server.serving(settings.socket, service, lock_path=None):
            yield


@asynccontextmanager
async def users_of(settings: ShimSettings) -> AsyncIterator[VolumesInUse | None]:
    """The users of volumes; None without `check_detach`. Raises `DetachNotChecked`."""
    if not settings.check_detach:
        yield None
        return
    access = settings.kubernetes or DetachAccess()
    try:
        client = await workers.run(api.client, access.kubeconfig)
    except api.UnusableKubeconfig as error:
        raise errors.InvalidRequest.named(
            "DetachNotChecked",
            "crust shim --controller cannot start: it would not know whether a guest uses a volume to be detached",
            why=f"the Kubernetes API cannot be used: {error.why}",
        ) from error
    users = VolumesInUse(client, access.node_absent_s)
    try:
        yield users
    finally:
        await client.close()
