"""A record: one volume that is published to a runtime, as a value, and its bytes in mountInfo.json.

A record that cannot be read raises an error, and the file stays for a person to look at. It never counts as absent: a
runtime that treats an unreadable record as absent would share the host's directory instead of mounting the volume.
Serialising is deterministic, gives one line, and makes the same checks as reading, so every written record is
readable.
"""

import datetime
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import pydantic

from crust.core import errors, logs, mount_options, traces, volumes
from crust.handoff import layout, mount_info

_COMPACT = json.JSONEncoder(separators=(",", ":"))

LIMIT_BYTES = 64 * 1024
"""The largest record that is read or written."""


class UnreadableHandoffRecord(errors.Corrupt):
    """mountInfo.json or claim.json cannot be read, or breaks its schema."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the record {path} cannot be read",
            why=why,
            hint="crust keeps it: find out who wrote it, then move the entry away and publish the volume again",
        )
        self.path = path


class UnrecordableMount(errors.InvalidRequest):
    """No valid record can express the deferred mount."""

    def __init__(self, target: volumes.TargetPath, why: str) -> None:
        super().__init__(
            f"the volume for {target} cannot be published to a runtime",
            why=why,
            hint="correct the driver or the request",
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A volume that is published to a runtime.

    Its `mount` is normalised: options for a guest's kernel, without "ro"; no secrets.
    """

    key: volumes.VolumeKey
    target: volumes.TargetPath
    handler: volumes.HandlerName
    mount: volumes.DeferredMount
    generation: int
    published_at: datetime.datetime
    decided_by: str = ""
    """What decided that it is deferred, for people."""
    request_id: str = ""
    """Of the call that published it."""
    traceparent: str = ""
    """The span of that call (W3C)."""
    pod: str = ""
    """`namespace/name`, for people; empty where the CO named none."""

    @classmethod
    def of(
        cls,
        mount: volumes.DeferredMount,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        handler: volumes.HandlerName,
        *,
        decided_by: str = "",
        pod: str = "",
    ) -> Self:
        """A new record (generation 1, published now) by the call that is being served.

        Options for the host alone (`_netdev`, `nofail`, …) are dropped; the option "ro" makes the volume read-only.
        Raises `CredentialInOptions`, `MountOptionNotAllowed`.
        """
        options = mount_options.for_guest(mount.mount_options)
        normal = replace(
            mount,
            mount_options=options.options,
            readonly=mount.readonly or options.readonly,
            secrets={},
        )
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        request_id = (logs.context.get() or {}).get("request_id", "")
        return cls(
            key,
            target,
            handler,
            normal,
            1,
            now,
            decided_by[: mount_info.TEXT_MAX],
            request_id,
            traces.traceparent(),
            pod[: mount_info.TEXT_MAX],
        )

    @property
    def digest(self) -> str:
        """The entry's name."""
        return self.target.digest

    @property
    def image(self) -> volumes.NetworkImage | None:
        """The image, if the volume is one that a hypervisor opens itself."""
        return self.mount.image

    @property
    def block(self) -> volumes.BlockSource:
        """The block device. Raises `NoDeviceOfImage` for an image."""
        if isinstance(self.mount.source, volumes.NetworkImage):
            raise errors.NotReady.named(
                "NoDeviceOfImage",
                f"the volume at {self.target} has no block device on this host",
                why=f"it is the image {self.mount.source} of a Ceph cluster, which a hypervisor opens itself",
                hint="use a runtime that offers NETWORK_IMAGE",
            )
        return self.mount.source

    @property
    def device(self) -> str:
        """The block device's path on the host. Raises `NoDeviceOfImage` for an image."""
        return self.block.path

    @property
    def identity(self) -> volumes.DeviceIdentity:
        """The device's identity. Raises `NoDeviceOfImage` for an image."""
        return self.block.identity

    @property
    def shown_source(self) -> str:
        """The device's path, or the image, for people."""
        source = self.mount.source
        return f"image {source}" if isinstance(source, volumes.NetworkImage) else source.path

    @property
    def readonly(self) -> bool:
        """Whether the volume is mounted read-only."""
        return self.mount.readonly

    def same_content(self, other: Self) -> bool:
        """Whether both are equal except for generation, time, call, and what decided."""
        same = replace(
            other,
            generation=self.generation,
            published_at=self.published_at,
            decided_by=self.decided_by,
            request_id=self.request_id,
            traceparent=self.traceparent,
            pod=self.pod,
        )
        return same == self

    def same_request(self, other: Self) -> bool:
        """Whether both publish the same volume in the same way; device, size and limits may differ."""
        mount = replace(
            other.mount,
            source=self.mount.source,
            capacity_bytes=self.mount.capacity_bytes,
            content_generation=self.mount.content_generation,
            io_limits=self.mount.io_limits,
        )
        return self.same_content(replace(other, mount=mount))

    def same_source(self, other: Self) -> bool:
        """Whether a sandbox that has the one has the other. Monitors and user of an image may have changed since."""
        if self.image is not None and other.image is not None:
            return self.image.identity == other.image.identity
        return self.image is other.image and self.identity == other.identity

    def to_bytes(self) -> bytes:
        """One line of JSON. Raises `UnrecordableMount` for what `parse` would not read back."""
        try:
            model = _model_of(self)
        except pydantic.ValidationError as err:
            raise UnrecordableMount(self.target, reasons(err)) from None
        plain = model.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _encode(plain, self.target)


def needs(
    *,
    readonly: bool,
    group: volumes.GroupChange | None,
    mount: volumes.DeferredMount | None = None,
) -> Iterator[tuple[volumes.HandlerFeature, str]]:
    """What a volume needs of a runtime beyond mounting it, and why. `mount`: all of it, when it is known."""
    feature = volumes.HandlerFeature
    if readonly:
        yield feature.READ_ONLY, "it is published read-only"
    elif group is not None:
        yield feature.GROUP, f"its files belong to group {group.gid} (fsGroup)"
    if mount is None:
        return
    if mount.io_limits != volumes.IoLimits():
        yield feature.IO_LIMITS, "it has I/O limits"
    if mount.format is not None and not readonly:
        yield feature.FORMAT, "it was created empty, so its filesystem may have to be made"
    if mount.image is not None:
        yield feature.NETWORK_IMAGE, f"it is the image {mount.image} of a Ceph cluster"
    if mount.encryption is not None:
        yield feature.LUKS, "it is encrypted"


def unsupported(
    handler: str, what: str, feature: volumes.HandlerFeature | None = None
) -> errors.CrustError:
    """The error about a runtime that cannot do what a volume needs; `feature`: what it does not offer."""
    return errors.NotReady.named(
        "UnsupportedByHandler",
        f"the volume cannot be used by runtime handler {handler!r}",
        why=f"{what}, and the runtime does not offer {feature.name}" if feature else what,
        hint="publish it without that, or not deferred, or use a runtime that offers it: `crust handlers`",
    )


def _encode(plain: dict[str, Any], target: volumes.TargetPath) -> bytes:
    data = f"{_COMPACT.encode(plain)}\n".encode("ascii")
    if len(data) > LIMIT_BYTES:
        raise UnrecordableMount(target, f"its record would have {len(data)} bytes")
    return data


def rewritten(record: Record, before: bytes) -> bytes:
    """The bytes of `record`, with the keys of a later version that `before` has.

    `before` is readable, so none of them is one that a reader must know.
    """
    plain, old = json.loads(record.to_bytes()), json.loads(before)
    known = _keys_of(mount_info.CrustPart)
    part = {key: value for key, value in old["crust"].items() if key not in known}
    kept = {key: value for key, value in old.items() if key not in _keys_of(mount_info.MountInfo)}
    return _encode({**plain, "crust": {**plain["crust"], **part}, **kept}, record.target)


def _keys_of(model: type[pydantic.BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


def parse(data: bytes, *, path: str = layout.RECORD, digest: str | None = None) -> Record:
    """Parse the bytes of a record. `path` is for messages; `digest` is the name of the entry that holds it.

    Raises `UnreadableHandoffRecord` and `NewerHandoffSchema`.
    """
    try:
        model = mount_info.MountInfo.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise _unreadable(data, path, err) from None  # the cause could carry an option's value
    try:
        record = _record_of(model)
    except errors.InvalidRequest as err:
        raise UnreadableHandoffRecord(path, str(err)) from err
    if digest is not None and record.digest != digest:
        raise UnreadableHandoffRecord(
            path, f"it is for {record.target}, whose entry is {record.digest}"
        )
    return record


def reasons(err: pydantic.ValidationError) -> str:
    """The errors, field by field, without the values."""
    found = err.errors(include_url=False, include_context=False, include_input=False)
    lines = (f"{'.'.join(map(str, each['loc'])) or 'the record'}: {each['msg']}" for each in found)
    return "; ".join(itertools.islice(lines, 5))


def _unreadable(data: bytes, path: str, err: pydantic.ValidationError) -> errors.Corrupt:
    schema = _schema_of(data)
    if schema <= mount_info.SCHEMA:
        return UnreadableHandoffRecord(path, reasons(err))
    return errors.Corrupt.named(
        "NewerHandoffSchema",
        f"the record {path} cannot be read",
        why=f"its schema is {schema}, and this version of crust reads up to {mount_info.SCHEMA}",
        hint="upgrade the process that reads it; upgrade the proxy and the runtimes of a node together",
    )


def _schema_of(data: bytes) -> int:
    """The schema of a record of any version; 0 where it says none."""
    try:
        schema = json.loads(data)["crust"]["schema"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return 0
    return schema if isinstance(schema, int) else 0


def _model_of(record: Record) -> mount_info.MountInfo:
    """Raises `pydantic.ValidationError`. The model drops no key that has a value, and None is no key in a file."""
    mount, group = record.mount, record.mount.group
    image = mount.source if isinstance(mount.source, volumes.NetworkImage) else None
    block = mount.source if isinstance(mount.source, volumes.BlockSource) else None
    guest_work = {
        "format": None if mount.format is None else asdict(mount.format),
        "encryption": None if mount.encryption is None else mount.encryption.value,
    }
    must_know = {"image": image, **guest_work}
    required = tuple(key for key, value in must_know.items() if value is not None)
    part = {
        "schema": mount_info.SCHEMA,
        "driver": record.key.driver,
        "volume_id": record.key.volume_id,
        "target_path": record.target.text,
        "handler": record.handler,
        "readonly": mount.readonly,
        "identity": None if block is None else asdict(block.identity),
        "image": None if image is None else asdict(image),
        "capacity_bytes": mount.capacity_bytes,
        "generation": record.generation,
        "content_generation": mount.content_generation,
        "published_at": record.published_at,
        "limits": None if mount.io_limits == volumes.IoLimits() else asdict(mount.io_limits),
        "decided_by": record.decided_by or None,
        "request_id": record.request_id or None,
        "traceparent": record.traceparent or None,
        "pod": record.pod or None,
        **guest_work,
        "required": required or None,
    }
    outer = {
        "volume-type": "network" if block is None else "block",
        "device": None if block is None else block.path,
        "fstype": mount.fs_type,
        "metadata": {}
        if group is None
        else {"fsGroup": str(group.gid), "fsGroupChangePolicy": group.policy.value},
        "options": ("ro", *mount.mount_options) if mount.readonly else mount.mount_options,
        "crust": {key: value for key, value in part.items() if value is not None},
    }
    return mount_info.MountInfo.model_validate(outer)


def _record_of(model: mount_info.MountInfo) -> Record:
    part = model.crust
    return Record(
        key=volumes.VolumeKey(volumes.DriverName(part.driver), volumes.VolumeId(part.volume_id)),
        target=volumes.TargetPath.parse(part.target_path),
        handler=volumes.HandlerName(part.handler),
        mount=_mount_of(model),
        generation=part.generation,
        published_at=part.published_at,
        decided_by=part.decided_by or "",
        request_id=part.request_id or "",
        traceparent=part.traceparent or "",
        pod=part.pod or "",
    )


def _mount_of(model: mount_info.MountInfo) -> volumes.DeferredMount:
    """The deferred mount of a record."""
    part = model.crust
    return volumes.DeferredMount(
        source=_source_from(model),
        fs_type=model.fs_type,
        mount_options=tuple(option for option in model.options if option != "ro"),
        group=_group_of(model.metadata),
        readonly=part.readonly,
        capacity_bytes=part.capacity_bytes,
        content_generation=part.content_generation,
        io_limits=volumes.IoLimits(**part.limits.model_dump())
        if part.limits
        else volumes.IoLimits(),
        format=volumes.GuestFormat(**part.format.model_dump()) if part.format else None,
        encryption=volumes.Encryption(part.encryption) if part.encryption else None,
    )


def _source_from(model: mount_info.MountInfo) -> volumes.BlockSource | volumes.NetworkImage:
    part = model.crust
    if part.image is not None:
        return volumes.NetworkImage(**part.image.model_dump())
    assert model.device is not None  # the model has checked it
    assert part.identity is not None
    device = volumes.TargetPath.parse(model.device, role="device")
    return volumes.BlockSource(device.text, volumes.DeviceIdentity(**part.identity.model_dump()))


def _group_of(metadata: mount_info.Metadata) -> volumes.GroupChange | None:
    if metadata.fs_group is None:
        if metadata.change_policy is not None:
            raise errors.InvalidRequest("fsGroupChangePolicy is set without fsGroup")
        return None
    policy = metadata.change_policy or volumes.GroupPolicy.ON_ROOT_MISMATCH.value
    return volumes.GroupChange.parse(metadata.fs_group, volumes.GroupPolicy(policy))
