"""For a driver in Python that defers (docs/driver-author.md), in a server of grpc or of grpc.aio.

The driver answers a publish with `defer_fs_ops` by `library.deferred_mount`, and NodeGetCapabilities by
`library.capabilities`; `crust shim` in front of it does the rest. Its messages may be of its own generated code, of
any version of CSI 1: crust's are in a descriptor pool of their own (`crust.wire.pool`). Such a request has
`defer_fs_ops` among its unknown fields, which `library.is_deferred` reads. Messages go from one class to the other as
bytes, and protobuf keeps the fields that a class does not know: an answer of the driver's class has `deferred_mount`.
"""

from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message

from crust.core import deferral_keys, volumes
from crust.host.block import devices
from crust.host.block.devices import identify as identify_device
from crust.host.mounts import mount_options
from crust.rpc.messages import csi, extensions
from crust.wire.csi.v1 import csi_pb2

__all__ = ["capabilities", "deferral_requested", "deferred_mount", "identify_device", "is_deferred"]

M = TypeVar("M", bound=Message)
_RPC = csi_pb2.NodeServiceCapability.RPC


def deferral_requested(context: Any) -> bool:
    """Whether the caller of NodeGetCapabilities knows deferral."""
    return extensions.requested(context.invocation_metadata(), extensions.DEFERRAL)


def is_deferred(request: Message) -> bool:
    """Whether a request to publish or unpublish has `defer_fs_ops`, which the driver's own class may not know."""
    kind = getattr(csi_pb2, request.DESCRIPTOR.name)
    return bool(_in_class(kind, request).defer_fs_ops)


def capabilities(context: Any, mine: M, *, group: bool = False) -> M:
    """The driver's NodeGetCapabilitiesResponse, with the capabilities of deferral for a caller that knows them.

    `group`: `deferred_mount` passes the request's group on, so the guest changes the group of the files.
    """
    if not deferral_requested(context):
        return mine
    answer = _in_class(csi_pb2.NodeGetCapabilitiesResponse, mine)
    numbers = [_RPC.DEFER_FS_OPS]
    if group:
        numbers.append(_RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP)
        numbers.append(_RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY)
    for number in numbers:
        answer.capabilities.add().rpc.type = number
    return _in_class(type(mine), answer)


def deferred_mount(
    path: str,
    fs_type: str,
    request: Message,
    *,
    io_limits: volumes.IoLimits = volumes.IoLimits(),  # noqa: B008 - frozen
    content_generation: int = 0,
) -> Any:
    """The answer to a flagged NodePublishVolume: the guest mounts the device at `path`, which holds an `fs_type`.

    Identity and size come from the device; options, group and read-only from the request. The answer's class belongs
    to the request's class. Reads sysfs: call it in a thread. Raises `errors.InvalidRequest` for a capability or a
    mount option that cannot be deferred, and the errors of `identify_device`.
    """
    publish = _in_class(csi_pb2.NodePublishVolumeRequest, request)
    capability = csi.capability(publish.volume_capability)
    access = capability.access
    if not isinstance(access, volumes.MountAccess):
        raise deferral_keys.raw_block_volume()
    deferred = volumes.DeferredMount(
        source=volumes.BlockSource(path, identify_device(path)),
        fs_type=fs_type,
        mount_options=mount_options.parse(access.mount_flags, for_guest=True),
        group=access.group,
        readonly=csi.is_readonly(publish),
        capacity_bytes=devices.size_bytes(path),
        content_generation=content_generation,
        io_limits=io_limits,
    )
    answer = csi_pb2.NodePublishVolumeResponse(deferred_mount=csi.deferred_mount_to_wire(deferred))
    file: Any = request.DESCRIPTOR.file
    descriptor = file.message_types_by_name["NodePublishVolumeResponse"]
    return _in_class(message_factory.GetMessageClass(descriptor), answer)


def _in_class(kind: type[M], message: Message) -> M:
    """The message in another class of the same CSI message, crust's or the driver's."""
    return message if isinstance(message, kind) else kind.FromString(message.SerializeToString())
