"""The shim as a library: puts deferral around the Node servicer of a driver in this process (docs/driver-author.md).

A servicer of grpc.aio is wrapped, and the result registered instead:

    async with library.connect("/run/crust/runtime.sock") as proxy:
        node = library.wrap(MyNode(), library.RuntimeClient(proxy))

One of grpc, whose methods block, with

    with library.connect_blocking("/run/crust/runtime.sock") as runtime:
        node = library.wrap(MyNode(), runtime)

`MyNode` answers a publish with `defer_fs_ops` by `library.deferred_mount`, and NodeGetCapabilities by
`library.capabilities`. Its messages may be of its own generated code, of any version of CSI 1: crust's are in a pool
of their own. Such a request has `defer_fs_ops` among its unknown fields: `library.is_deferred` reads it.
"""

from typing import Any, TypeVar

from google.protobuf.message import Message

from crust import errors, mount_options, volumes
from crust.csi_shim.deferral import Deferral
from crust.csi_shim.drivers_messages import like, ours
from crust.csi_shim.runtime_client import RuntimeClient
from crust.csi_shim.servicers import (
    BlockingRuntime,
    BlockingWrapped,
    DriverRaised,
    Servicer,
    Wrapped,
    WrongKindOfServicer,
    connect_blocking,
)
from crust.host.block import devices
from crust.host.block.devices import identify as identify_device
from crust.rpc.channel import connect
from crust.rpc.messages import csi
from crust.rpc.messages.extensions import deferral_requested
from crust.wire.csi.v1 import csi_pb2

__all__ = [
    "BlockingRuntime",
    "DriverRaised",
    "RawBlockNotDeferred",
    "RuntimeClient",
    "WrongKindOfServicer",
    "capabilities",
    "connect",
    "connect_blocking",
    "deferral_requested",
    "deferred_mount",
    "identify_device",
    "is_deferred",
    "wrap",
]

M = TypeVar("M", bound=Message)
_RPC = csi_pb2.NodeServiceCapability.RPC


class RawBlockNotDeferred(errors.InvalidRequest):
    """A raw block volume was to be deferred: there is nothing to mount."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id[:128]} cannot be published with deferral",
            why="it is a raw block volume: there is nothing to mount",
            hint="publish it without deferral",
        )


def wrap(
    node: Any, runtime: RuntimeClient | BlockingRuntime, *, report_condition: bool = True
) -> Any:
    """A servicer that answers flagged calls itself and passes all others to `node`.

    `node` must advertise DEFER_FS_OPS to a caller that sends `crust-extensions: deferral` (`capabilities`). With
    `report_condition` the statistics carry the volume condition of CSI 1.12. Raises `WrongKindOfServicer`.
    """
    servicer = Servicer(node)
    if servicer.is_async == isinstance(runtime, BlockingRuntime):
        raise WrongKindOfServicer(node, is_async=servicer.is_async)
    if isinstance(runtime, BlockingRuntime):
        deferral = Deferral(servicer, runtime.client, report_condition=report_condition)
        return BlockingWrapped(node, servicer, deferral, runtime)
    deferral = Deferral(servicer, runtime, report_condition=report_condition)
    # its constructor sets the methods that mypy misses
    return Wrapped(node, servicer, deferral)  # type: ignore[abstract]


def is_deferred(request: Message) -> bool:
    """Whether a request to publish or unpublish has `defer_fs_ops`, which the driver's own class may not know."""
    kind = getattr(csi_pb2, request.DESCRIPTOR.name)
    return bool(ours(kind, request).defer_fs_ops)


def capabilities(context: Any, mine: M, *, group: bool = False) -> M:
    """The driver's NodeGetCapabilitiesResponse with those of deferral, for a caller that knows them.

    `group`: `deferred_mount` passes the request's group on, so the guest changes the group of the files.
    """
    if not deferral_requested(context):
        return mine
    answer = ours(csi_pb2.NodeGetCapabilitiesResponse, mine)
    numbers = [_RPC.DEFER_FS_OPS]
    if group:
        numbers.append(_RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP)
        numbers.append(_RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY)
    for number in numbers:
        answer.capabilities.add().rpc.type = number
    return ours(type(mine), answer)


def deferred_mount(
    path: str,
    fs_type: str,
    request: Message,
    *,
    io_limits: volumes.IoLimits = volumes.IoLimits(),  # noqa: B008 - frozen
    content_generation: int = 0,
) -> Any:
    """The answer to a flagged NodePublishVolume: the guest mounts the device at `path`, which holds an `fs_type`.

    Identity and size are the device's; options, group and read-only are the request's. The answer is of the class
    that goes with the request. Reads sysfs: call it in a thread. Raises `errors.InvalidRequest` for a capability or a
    mount option that cannot be deferred, and what `identify_device` raises.
    """
    asked = ours(csi_pb2.NodePublishVolumeRequest, request)
    capability = csi.capability(asked.volume_capability)
    access = capability.access
    if not isinstance(access, volumes.MountAccess):
        raise RawBlockNotDeferred(asked.volume_id)
    options = mount_options.for_guest(access.mount_flags)
    deferred = volumes.DeferredMount(
        source=volumes.BlockSource(path, identify_device(path)),
        fs_type=fs_type,
        mount_options=options.options,
        group=access.group,
        readonly=asked.readonly or options.readonly or capability.mode.reader_only,
        capacity_bytes=devices.size_bytes(path),
        content_generation=content_generation,
        io_limits=io_limits,
    )
    answer = csi_pb2.NodePublishVolumeResponse(deferred_mount=csi.deferred_mount_to_wire(deferred))
    return like(answer, request)
