"""The codec of CSI: converts its messages to core types and back, and checks the fields of requests.

Decoding checks everything: a decoded value obeys the specification, and an invalid field raises an `InvalidRequest`
that names it. Encoding does not check. Mount flags may be sensitive (CSI MountVolume) and are never part of an
error's text.

A string has at most 128 bytes and a map at most 4 KiB, keys and values together, unless its field says otherwise
(CSI "Size Limits"). A kubelet puts pod data and service account tokens into contexts and secrets under keys of its
own, and these alone may be longer, so they are not counted. Errors name the field and its length, never its content.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from crust.core import deferral_keys, errors, volumes
from crust.host.mounts import mount_options
from crust.rpc.messages import crust_v1
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import types_pb2

MAP_MAX_BYTES = 4096
RECORDED_ID_MAX_BYTES = 512
"""The limit of a record of the handoff directory. Public drivers have ids of 250 bytes, and no CO refuses them."""

_CONTROL = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")
_FLAGS_MAX_BYTES = 4096
_READER_MODES = frozenset(mode.value for mode in volumes.AccessMode if mode.reader_only)


class MissingField(errors.InvalidRequest):
    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is missing", why="CSI requires it", hint=f"set {field}")


class StagingPathNotGiven(errors.NotReady):
    def __init__(self) -> None:
        super().__init__("staging_target_path is missing", why="this driver stages volumes")


class FieldTooLong(errors.InvalidRequest):
    def __init__(self, field: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{field} is too long", why=f"it has {size_bytes} bytes, CSI allows {limit_bytes}"
        )


def check_page(max_entries: int, token: str, is_token: Callable[[str], bool]) -> None:
    """Check the page of a list request. Raises `NegativeMaxEntries`; `InvalidStartingToken` unless `is_token`.

    CSI ListVolumes: ABORTED for the token, and the CO starts over.
    """
    if max_entries < 0:
        raise errors.InvalidRequest.named(
            "NegativeMaxEntries", "max_entries is invalid", why=f"{max_entries} is negative"
        )
    if token and not is_token(token):
        raise errors.OperationPending.named(
            "InvalidStartingToken",
            f"the starting_token {token[:64]!r} is invalid",
            why="this driver did not issue it",
        )


def required(value: str, field: str, *, limit_bytes: int = volumes.ID_MAX_BYTES) -> str:
    """`value`, present, short enough and free of control characters.

    Raises `MissingField`, `FieldTooLong`, `InvalidCharacters`.
    """
    if not value:
        raise MissingField(field)
    size_bytes = len(value.encode())
    if size_bytes > limit_bytes:
        raise FieldTooLong(field, size_bytes, limit_bytes)
    if _CONTROL.search(value):
        raise errors.InvalidRequest.named(
            "InvalidCharacters", f"{field} is invalid", why="it holds a control character"
        )
    return value


def mapping(values: Mapping[str, str], field: str) -> dict[str, str]:
    """A plain copy of a string map. Raises `FieldTooLong`."""
    size_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in values.items())
    if size_bytes > MAP_MAX_BYTES:
        raise FieldTooLong(field, size_bytes, MAP_MAX_BYTES)
    return dict(values)


def check_context(values: Mapping[str, str], field: str) -> None:
    """Check a context, or secrets, against the size limit of maps. Raises `FieldTooLong`."""
    if not values:
        return
    mapping(
        {key: text for key, text in values.items() if not key.startswith(deferral_keys.KUBERNETES)},
        field,
    )


def shortened(text: str) -> str:
    """`text`, shortened to the size limit of strings, for a response."""
    data = text.encode()
    if len(data) <= volumes.ID_MAX_BYTES:
        return text
    return data[: volumes.ID_MAX_BYTES - 3].decode("utf-8", "ignore") + "…"


def volume_id(value: str) -> volumes.VolumeId:
    """A volume id of a request. Raises `MissingField`, `FieldTooLong`, `InvalidCharacters`."""
    return volumes.VolumeId(required(value, "volume_id"))


def volume_id_of_any_driver(value: str) -> volumes.VolumeId:
    """The id of any driver's volume: it may be longer than CSI says, up to the limit of a record."""
    return volumes.VolumeId(required(value, "volume_id", limit_bytes=RECORDED_ID_MAX_BYTES))


class UnsupportedValue(errors.InvalidRequest):
    def __init__(self, field: str, value: object) -> None:
        super().__init__(f"{field} is invalid", why=f"CSI does not define the value {value} for it")


class InvalidDeferredMount(errors.RuntimeFailed):
    def __init__(self, why: str) -> None:
        super().__init__("the driver's deferred_mount is invalid", why=why)


def capability(
    pb: csi_pb2.VolumeCapability, *, field: str = "volume_capability"
) -> volumes.VolumeCapability:
    """Decode and check a capability.

    Raises `MissingField`, `UnsupportedValue`, `FieldTooLong` and `errors.InvalidRequest` (group fields).
    """
    kind = pb.WhichOneof("access_type")
    if kind is None:
        raise MissingField(f"{field}.access_type")
    access: volumes.BlockAccess | volumes.MountAccess = volumes.BlockAccess()
    if kind == "mount":
        mount, flags = pb.mount, tuple(pb.mount.mount_flags)
        flags_bytes = sum(len(flag.encode()) for flag in flags)
        if flags_bytes > _FLAGS_MAX_BYTES:
            raise FieldTooLong(f"{field}.mount.mount_flags", flags_bytes, _FLAGS_MAX_BYTES)
        if mount.fs_type:
            required(mount.fs_type, f"{field}.mount.fs_type")
        policy = mount.volume_supplemental_group_change_policy
        group = _group(mount.volume_mount_group, mount.volume_supplemental_group, policy)
        access = volumes.MountAccess(mount.fs_type, flags, group)
    number = pb.access_mode.mode
    if not pb.HasField("access_mode") or number == 0:
        raise MissingField(f"{field}.access_mode")
    try:
        return volumes.VolumeCapability(access, volumes.AccessMode(number))
    except ValueError as err:
        raise UnsupportedValue(f"{field}.access_mode.mode", number) from err


def capacity_range(pb: types_pb2.CapacityRange | csi_pb2.CapacityRange) -> volumes.CapacityRange:
    """Decode a range; raises `errors.InvalidRequest`, and `errors.OutOfRange` when no size can satisfy it."""
    if pb.required_bytes < 0 or pb.limit_bytes < 0:
        raise errors.InvalidRequest(
            "the capacity range is invalid", why="a number of bytes is negative"
        )
    if pb.limit_bytes and pb.required_bytes > pb.limit_bytes:
        raise errors.OutOfRange(
            "the capacity range is empty",
            why=f"required_bytes {pb.required_bytes} is above limit_bytes {pb.limit_bytes}",
            hint="raise the limit or ask for less",
        )
    return volumes.CapacityRange(pb.required_bytes, pb.limit_bytes)


def is_readonly(request: csi_pb2.NodePublishVolumeRequest) -> bool:
    """Whether a publish wants no writer: by its field, its access mode, or its mount flags."""
    capability = request.volume_capability
    return (
        request.readonly
        or capability.access_mode.mode in _READER_MODES
        or mount_options.readonly(capability.mount.mount_flags)
    )


def capabilities(pbs: Iterable[csi_pb2.VolumeCapability]) -> tuple[volumes.VolumeCapability, ...]:
    """Decode a list of capabilities; at least one is required. Raises as `capability` does."""
    field = "volume_capabilities"
    decoded = tuple(capability(pb, field=f"{field}[{n}]") for n, pb in enumerate(pbs))
    if not decoded:
        raise MissingField(field)
    return decoded


def _group(delegated: str, supplemental: str, policy: str) -> volumes.GroupChange | None:
    """The group, from either field; if both are set they must be equal (KEP-2857)."""
    if policy and not supplemental:
        raise errors.InvalidRequest(
            "volume_supplemental_group_change_policy is set without volume_supplemental_group"
        )
    if delegated and supplemental and delegated != supplemental:
        raise errors.InvalidRequest(
            "volume_mount_group and volume_supplemental_group differ",
            hint="send the same group in both, or one of them",
        )
    group = supplemental or delegated
    if delegated == "0" and not supplemental:
        # a pod may ask for the group of root, and a host mount supports it
        return volumes.GroupChange(0)
    if not group:
        return None
    try:
        choice = volumes.GroupPolicy(policy or volumes.GroupPolicy.ON_ROOT_MISMATCH.value)
    except ValueError as err:
        shown = repr(policy[:32])
        raise UnsupportedValue("volume_supplemental_group_change_policy", shown) from err
    return volumes.GroupChange.parse(group, choice)


def deferred_mount(pb: csi_pb2.DeferredMount) -> volumes.DeferredMount:
    """Decode and check a driver's answer; raises `InvalidDeferredMount`. The record checks its options."""
    if not pb.fs_type:
        raise InvalidDeferredMount("fs_type is empty")
    if pb.capacity_bytes <= 0:
        raise InvalidDeferredMount("capacity_bytes is not set")
    if pb.encryption not in ("", volumes.Encryption.LUKS.value):
        raise InvalidDeferredMount(f"its encryption {pb.encryption[:32]!r} is not known")
    if pb.encryption and not pb.secrets.get(deferral_keys.PASSPHRASE):
        raise InvalidDeferredMount("it is encrypted, and secrets has no passphrase")
    try:
        guest_format = None
        if pb.HasField("format"):
            has_percent = pb.format.HasField("ext4_reserved_percent")
            percent = pb.format.ext4_reserved_percent if has_percent else None
            guest_format = volumes.GuestFormat(pb.format.ext4_bytes_per_inode or None, percent)
        return volumes.DeferredMount(
            source=_source(pb),
            fs_type=required(pb.fs_type, "deferred_mount.fs_type"),
            mount_options=tuple(pb.mount_options),
            group=_group("", pb.supplemental_group, pb.supplemental_group_change_policy),
            readonly=pb.readonly,
            capacity_bytes=pb.capacity_bytes,
            content_generation=pb.content_generation,
            io_limits=crust_v1.io_limits(pb.io_limits),
            format=guest_format,
            encryption=volumes.Encryption(pb.encryption) if pb.encryption else None,
            secrets=dict(pb.secrets),
        )
    except errors.InvalidRequest as err:
        raise InvalidDeferredMount(str(err)) from err


def _source(pb: csi_pb2.DeferredMount) -> volumes.BlockSource | volumes.NetworkImage:
    """The record checks the content of an image's parts (`mount_info_models.Image`)."""
    if pb.HasField("network_image"):
        image = pb.network_image
        if not pb.secrets.get(deferral_keys.USER_KEY):
            raise InvalidDeferredMount("it is an image, and secrets has no userKey")
        names = (image.cluster, image.pool, image.image, image.monitors, image.user)
        if not all(names):
            raise InvalidDeferredMount(
                "cluster, pool, image, monitors or user of the image is not set"
            )
        monitors = tuple(image.monitors)
        return volumes.NetworkImage(
            image.cluster, image.pool, image.namespace, image.image, monitors, image.user
        )
    if not pb.HasField("block_device"):
        raise InvalidDeferredMount("its source is of an unknown kind")
    identity = pb.block_device.identity
    if identity.disk_sequence == 0:
        raise InvalidDeferredMount("the device's identity is not set")
    path = volumes.TargetPath.parse(pb.block_device.path, role="deferred_mount.block_device.path")
    number = volumes.DeviceIdentity(identity.major, identity.minor, identity.disk_sequence)
    return volumes.BlockSource(path.text, number)


def deferred_mount_to_wire(value: volumes.DeferredMount) -> csi_pb2.DeferredMount:
    """Encode a deferred mount, whose options `mount_options.parse` gave."""
    pb = csi_pb2.DeferredMount(
        fs_type=value.fs_type,
        mount_options=value.mount_options,
        readonly=value.readonly,
        capacity_bytes=value.capacity_bytes,
        content_generation=value.content_generation,
    )
    if isinstance(value.source, volumes.NetworkImage):
        pb.network_image.CopyFrom(csi_pb2.DeferredMount.NetworkImage(**asdict(value.source)))
    else:
        identity = value.source.identity
        pb.block_device.path = value.source.path
        pb.block_device.identity.major = identity.major
        pb.block_device.identity.minor = identity.minor
        pb.block_device.identity.disk_sequence = identity.disk_sequence
    if value.group is not None:
        pb.supplemental_group = str(value.group.gid)
        pb.supplemental_group_change_policy = value.group.policy.value
    if value.io_limits != volumes.IoLimits():
        pb.io_limits.CopyFrom(csi_pb2.DeferredMount.IoLimits(**asdict(value.io_limits)))
    if value.format is not None:
        pb.format.SetInParent()
        pb.format.ext4_bytes_per_inode = value.format.ext4_bytes_per_inode or 0
        if value.format.ext4_reserved_percent is not None:
            pb.format.ext4_reserved_percent = value.format.ext4_reserved_percent
    if value.encryption is not None:
        pb.encryption = value.encryption.value
    if value.needs_secrets:
        pb.secrets.update(value.secrets)
    return pb


def stats_to_wire(value: volumes.VolumeStats) -> csi_pb2.NodeGetVolumeStatsResponse:
    """Encode statistics, with the condition if it is known (CSI 1.12)."""
    return csi_pb2.NodeGetVolumeStatsResponse(
        usage=crust_v1.usages_to_wire(value, csi_pb2.VolumeUsage),
        volume_condition=None if value.condition is None else condition_to_wire(value.condition),
    )


def condition_to_wire(value: volumes.VolumeCondition) -> csi_pb2.VolumeCondition:
    """Encode a volume's condition (CSI 1.12). Its message may be long, so it is shortened."""
    return csi_pb2.VolumeCondition(abnormal=value.abnormal, message=shortened(value.message))
