"""The keys of crust in a StorageClass when a wrapped driver creates a volume, and the request to the driver.

The driver never sees a key of crust: strict drivers refuse unknown keys. The answer has the keys in its volume
context, where the node's shim and the proxy find them, with `crust.dev/created-empty` if nobody can have written the
volume. That takes three signs: the request names no source, the answer names none, and no parameter does (some
drivers take a backup there).

The shim changes the kind from mount to block only if every use of the volume will be deferred: some drivers fix the
kind at creation, and one driver formats a mount at creation. The shim checks the access mode before: a driver may
accept a mode for block that it refuses for mounts.
"""

from collections.abc import Iterable, Mapping

from crust.core import deferral_keys, errors
from crust.core.deferral_keys import Defer
from crust.csi_shim.wrap import admission, vendors
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2

_PARAMETERS = (
    deferral_keys.DEFER,
    deferral_keys.RUNTIME_HANDLER,
    deferral_keys.FORMAT_IN,
    deferral_keys.ENCRYPTION,
    deferral_keys.GROW_IN,
    deferral_keys.EXT4_BYTES_PER_INODE,
    deferral_keys.EXT4_RESERVED_PERCENT,
)
_AS_CRUST = {"bytesperinode": deferral_keys.EXT4_BYTES_PER_INODE}
"""Vendors' parameters for mkfs that a guest's mkfs can follow, and crust's keys for them. Lower case."""


def class_keys(parameters: Mapping[str, str]) -> dict[str, str]:
    """The keys of crust for a volume of a StorageClass; it is never deferred if the class has none.

    A class with other keys and no choice leaves the choice to the node's proxy.
    Raises `UnknownCrustParameter`, `deferral_keys.InvalidDeferKey`, `InvalidRequest`.
    """
    keys = {key: value for key, value in parameters.items() if key.startswith(deferral_keys.PREFIX)}
    for key in keys:
        if key not in _PARAMETERS:
            raise errors.InvalidRequest.named(
                "UnknownCrustParameter",
                f"the parameter {key[:128]!r} is not known",
                why=f"the shim knows {', '.join(_PARAMETERS)}",
            )
    if is_block(keys):
        for key, value in parameters.items():
            if key.lower() in _AS_CRUST:
                keys.setdefault(_AS_CRUST[key.lower()], value)
    deferral_keys.guest_format({**keys, deferral_keys.CREATED_EMPTY: "true"})
    deferral_keys.format_in(keys)
    deferral_keys.grows_on_host(keys)
    return keys or {deferral_keys.DEFER: Defer.NEVER.value}


def has_keys(context: Mapping[str, str]) -> bool:
    """Whether parameters or a volume context have keys of crust."""
    return any(key.startswith(deferral_keys.PREFIX) for key in context)


def is_block(context: Mapping[str, str]) -> bool:
    """Whether the driver is told that the volume is a block volume. Raises `deferral_keys.InvalidDeferKey`."""
    return deferral_keys.defer(context) is Defer.ALWAYS


def to_driver(
    request: csi_pb2.CreateVolumeRequest, keys: Mapping[str, str], driver: str
) -> csi_pb2.CreateVolumeRequest:
    """The request that the driver gets.

    Raises `admission.CannotBeDeferred`, and `errors.InvalidRequest` for an invalid capability.
    """
    sent = csi_pb2.CreateVolumeRequest()
    sent.CopyFrom(request)
    deferral_keys.remove(sent.parameters)
    mounts = [each for each in request.volume_capabilities if each.HasField("mount")]
    if not deferral_keys.may_defer(keys) or not mounts:
        return sent
    for mount in mounts:
        admission.check_mode(request.name, csi.capability(mount))
        fs_type = mount.mount.fs_type or admission.DEFAULT_FS_TYPE
        why = vendors.why_not_deferrable(driver, "", fs_type, request.parameters)
        if why:
            raise admission.CannotBeDeferred(request.name, why)
    plain = {
        key: value for key, value in request.parameters.items() if key.lower() not in _AS_CRUST
    }
    if option := vendors.mkfs_option(plain):
        raise admission.CannotBeDeferred(
            request.name, f"a guest makes its filesystem, and cannot follow {option}"
        )
    if is_block(keys):
        for key in sent.parameters.keys() - plain.keys():
            del sent.parameters[key]
        as_block(sent.volume_capabilities)
    return sent


def context_of(
    request: csi_pb2.CreateVolumeRequest,
    answer: csi_pb2.CreateVolumeResponse,
    keys: Mapping[str, str],
) -> dict[str, str]:
    """The keys of crust for the volume context of the answer."""
    is_filled = request.HasField("volume_content_source") or answer.volume.HasField(
        "content_source"
    )
    contexts = (request.parameters, answer.volume.volume_context)
    if is_filled or any(map(vendors.never_formats, contexts)) or not deferral_keys.may_defer(keys):
        return dict(keys)
    return {**keys, deferral_keys.CREATED_EMPTY: "true"}


def as_block(capabilities: Iterable[csi_pb2.VolumeCapability]) -> None:
    """Change the kind of each mount. The driver refuses a capability without a kind."""
    for capability in capabilities:
        if capability.HasField("mount"):
            capability.block.SetInParent()
