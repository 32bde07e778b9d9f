"""A record: one volume that is published to a runtime, as the strict model of its file, mountInfo.json.

The outer keys are those of KEP-2857 and of Kata's direct volumes, so that both can read a record; the object "crust"
(`crust.handoff.mount_info_models`) holds the keys that only crust needs. A later version may add keys without a new
schema. A reader ignores the keys that it does not know, so that an older runtime works with a newer proxy, and a
rewrite keeps them; a key that must not be ignored is named in `crust.required`, and a reader that does not know it
refuses the record.

A record that cannot be read raises an error, and the file stays for a person to look at. It never counts as absent: a
runtime that treats an unreadable record as absent would share the host's directory instead of mounting the volume.
Every record is made with the checks of reading, so every written record is readable. Only keys of the model are
written, so that no secret can get into a record: `metadata` has two allowed keys, and `host.mounts.mount_options`
checks the options.

`make proto` generates specs/mountInfo.schema.json from it, so the docstrings of the fields are part of the contract.
"""

import datetime
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from crust.core import errors, logs, traces, volumes
from crust.handoff import layout
from crust.handoff.mount_info_models import (
    SCHEMA,
    TEXT_MAX,
    AbsolutePath,
    CrustPart,
    FsType,
    Limits,
    Metadata,
    Model,
    Reserved,
)
from crust.host.mounts import mount_options

LIMIT_BYTES = 64 * 1024
"""The largest record that is read or written."""

_COMPACT = json.JSONEncoder(separators=(",", ":"))


class UnreadableHandoffRecord(errors.Corrupt):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the record {path} cannot be read", why=why)


class UnrecordableMount(errors.InvalidRequest):
    def __init__(self, target: str, why: str) -> None:
        super().__init__(f"the volume for {target} cannot be published to a runtime", why=why)


class Record(Model):
    """mountInfo.json: a volume that is published to a runtime."""

    model_config = ConfigDict(extra="allow")

    volume_type: Annotated[Literal["block", "network"], Field(alias="volume-type")]
    """"network": an image that the hypervisor opens itself, `crust.image`."""
    device_path: Annotated[AbsolutePath | None, Field(alias="device")] = None
    """The block device's path on the host; check it against `crust.identity`. An image on the network has none."""
    fs_type: Annotated[FsType, Field(alias="fstype")]
    metadata: Metadata = Metadata()
    options: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = ()
    """Mount options for the kernel that mounts. "ro" is among them if and only if the volume is read-only."""
    crust: CrustPart

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        block = (self.device_path is not None, self.crust.identity is not None)
        if self.volume_type == "block" and (not all(block) or self.crust.image is not None):
            raise ValueError("a block device has device and crust.identity, and no crust.image")
        if self.volume_type == "network" and (any(block) or self.crust.image is None):
            raise ValueError("an image has crust.image, and neither device nor crust.identity")
        if self.crust.image is not None and "image" not in (self.crust.required or ()):
            raise ValueError("crust.required does not name the image")
        if self.metadata.fs_group is None and self.metadata.change_policy is not None:
            raise ValueError("fsGroupChangePolicy is set without fsGroup")
        if ("ro" in self.options) != self.crust.readonly:
            raise ValueError("options and crust.readonly disagree about 'ro'")
        options = self.mount.mount_options
        if mount_options.parse(options, for_guest=True) != options:
            raise ValueError("options holds mount options that are not for a guest's kernel")
        return self

    @classmethod
    def of(  # noqa: PLR0913 - the parts of a record
        cls,
        mount: volumes.DeferredMount,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        handler: volumes.HandlerName,
        *,
        request: str = "",
        decided_by: str = "",
        pod: str = "",
    ) -> Self:
        """A new record (generation 1, published now) by the call that is being served.

        Options for the host alone (`_netdev`, `nofail`, …) are dropped; the option "ro" makes the volume read-only.
        Raises `CredentialInOptions`, `MountOptionNotAllowed`, and `UnrecordableMount` if `parse` would refuse it.
        """
        part = {
            "schema": SCHEMA,
            "driver": key.driver,
            "volume_id": key.volume_id,
            "target_path": target.text,
            "handler": handler,
            "generation": 1,
            "published_at": datetime.datetime.now(datetime.UTC).replace(microsecond=0),
            "decided_by": decided_by[:TEXT_MAX] or None,
            "request": request or None,
            "request_id": (logs.context.get() or {}).get("request_id"),
            "traceparent": traces.traceparent() or None,
            "pod": pod[:TEXT_MAX] or None,
        }
        return cls._made({}, part, mount)

    @classmethod
    def parse(cls, data: bytes, *, path: str = layout.RECORD, digest: str | None = None) -> Self:
        """Parse the bytes of a record. `path` is for messages; `digest` is the name of the entry that holds it.

        Raises `UnreadableHandoffRecord` and `NewerHandoffSchema`.
        """
        try:
            record = cls.model_validate_json(data)
            target = record.target
        except ValidationError as err:
            raise _unreadable(data, path, err) from None  # the cause could carry an option's value
        except errors.InvalidRequest as err:
            raise UnreadableHandoffRecord(path, str(err)) from err
        if digest not in (None, target.digest):
            why = f"it is for {target}, whose entry is {target.digest}"
            raise UnreadableHandoffRecord(path, why)
        return record

    def replaced(self, mount: volumes.DeferredMount | None = None, **part: Any) -> Self:
        """This record with another mount, and other values in `crust`. Keys of a later version stay. As `of`."""
        old = self.model_dump(by_alias=True, exclude_unset=True)
        return self._made(old, part, self.mount if mount is None else mount)

    @classmethod
    def _made(
        cls, old: Mapping[str, Any], part: Mapping[str, Any], mount: volumes.DeferredMount
    ) -> Self:
        """The record `old` with the values of `part` in `crust`, and with another mount."""
        options = mount_options.parse(mount.mount_options, for_guest=True)
        readonly = mount.readonly or mount_options.readonly(mount.mount_options)
        mount = replace(mount, mount_options=options, readonly=readonly)
        image, group = mount.image, mount.group
        block = mount.source if isinstance(mount.source, volumes.BlockSource) else None
        must_know = {
            "image": asdict(image) if image else None,
            "format": _changed({}, asdict(mount.format)) if mount.format else None,
            "encryption": mount.encryption.value if mount.encryption else None,
        }
        part = {
            **part,
            **must_know,
            "readonly": mount.readonly,
            "identity": asdict(block.identity) if block else None,
            "capacity_bytes": mount.capacity_bytes,
            "content_generation": mount.content_generation,
            "limits": asdict(mount.io_limits) if mount.io_limits != volumes.IoLimits() else None,
            "required": tuple(_changed({}, must_know)) or None,
        }
        crust = _changed(old.get("crust", {}), part)
        outer = {
            "volume-type": "block" if block else "network",
            "device": block.path if block else None,
            "fstype": mount.fs_type,
            "metadata": {"fsGroup": str(group.gid), "fsGroupChangePolicy": group.policy.value}
            if group
            else {},
            "options": ("ro", *mount.mount_options) if mount.readonly else mount.mount_options,
            "crust": crust,
        }
        try:
            return cls.model_validate(_changed(old, outer))
        except ValidationError as err:
            raise UnrecordableMount(crust["target_path"], reasons(err)) from None

    @cached_property
    def key(self) -> volumes.VolumeKey:
        part = self.crust
        return volumes.VolumeKey(volumes.DriverName(part.driver), volumes.VolumeId(part.volume_id))

    @cached_property
    def target(self) -> volumes.TargetPath:
        """The path at which the CO has published it. Raises `InvalidPath` only while the record is read."""
        return volumes.TargetPath.parse(self.crust.target_path)

    @cached_property
    def mount(self) -> volumes.DeferredMount:
        """How to mount it: options for a guest's kernel, without "ro"; no secrets."""
        part, metadata = self.crust, self.metadata
        source: volumes.BlockSource | volumes.NetworkImage
        if part.image is not None:
            source = volumes.NetworkImage(**part.image.model_dump())
        else:
            assert self.device_path is not None  # the model has checked it
            assert part.identity is not None
            identity = volumes.DeviceIdentity(**part.identity.model_dump())
            device = volumes.TargetPath.parse(self.device_path, role="device")
            source = volumes.BlockSource(device.text, identity)
        policy = volumes.GroupPolicy(metadata.change_policy or "OnRootMismatch")
        group = volumes.GroupChange.parse(metadata.fs_group, policy) if metadata.fs_group else None
        return volumes.DeferredMount(
            source=source,
            fs_type=self.fs_type,
            mount_options=tuple(option for option in self.options if option != "ro"),
            group=group,
            readonly=part.readonly,
            capacity_bytes=part.capacity_bytes,
            content_generation=part.content_generation,
            io_limits=volumes.IoLimits(**(part.limits or Limits()).model_dump()),
            format=volumes.GuestFormat(**part.format.model_dump()) if part.format else None,
            encryption=volumes.Encryption(part.encryption) if part.encryption else None,
        )

    @property
    def handler(self) -> volumes.HandlerName:
        return volumes.HandlerName(self.crust.handler)

    @property
    def digest(self) -> str:
        return self.target.digest

    @property
    def image(self) -> volumes.NetworkImage | None:
        """The image, if the hypervisor opens the volume itself."""
        return self.mount.image

    @property
    def block(self) -> volumes.BlockSource:
        """The block device. Raises `NoDeviceOfImage` for an image."""
        if isinstance(self.mount.source, volumes.NetworkImage):
            raise errors.NotReady.named(
                "NoDeviceOfImage",
                f"the volume at {self.target} has no block device on this host",
                why=f"it is the image {self.mount.source} of a Ceph cluster, which a hypervisor opens itself",
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
        return self.crust.readonly

    @property
    def reserved(self) -> Reserved:
        """The volume and the device that are not free while it is published."""
        return Reserved(self.key, self.target, self.image or self.identity, self.readonly)

    def same_publish(self, key: volumes.VolumeKey, request: str | None) -> bool:
        """Whether this request for this volume has made it; one that does not name its request is of no other."""
        return self.key == key and self.crust.request == request

    def same_source(self, other: Self) -> bool:
        """Whether both name the same device or image. Monitors and user of an image may have changed since."""
        if self.image is not None and other.image is not None:
            return self.image.identity == other.image.identity
        return self.image is other.image and self.identity == other.identity

    def to_bytes(self) -> bytes:
        """One line of JSON, always the same. Raises `UnrecordableMount` for more than `LIMIT_BYTES`."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        data = f"{_COMPACT.encode(plain)}\n".encode("ascii")
        if len(data) > LIMIT_BYTES:
            raise UnrecordableMount(str(self.target), f"its record would have {len(data)} bytes")
        return data


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; None in `new` removes a key: a file has no null."""
    return {key: value for key, value in {**old, **new}.items() if new.get(key, ...) is not None}


def needs(
    *, readonly: bool, group: volumes.GroupChange | None, mount: volumes.DeferredMount | None = None
) -> Iterator[tuple[volumes.HandlerFeature, str]]:
    """The features that a volume needs of a runtime, with reasons. `mount`: the whole mount, if it is known."""
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
    handler: str, reason: str, feature: volumes.HandlerFeature | None = None
) -> errors.CrustError:
    """The error about a runtime that cannot serve a volume; `feature`: the missing feature."""
    return errors.NotReady.named(
        "UnsupportedByHandler",
        f"the volume cannot be used by runtime handler {handler!r}",
        why=f"{reason}, and the runtime does not offer {feature.name}" if feature else reason,
    )


def reasons(err: ValidationError) -> str:
    """The errors, field by field, without the values."""
    problems = err.errors(include_url=False, include_context=False, include_input=False)
    lines = (
        f"{'.'.join(map(str, problem['loc'])) or 'the record'}: {problem['msg']}"
        for problem in problems
    )
    return "; ".join(itertools.islice(lines, 5))


def _unreadable(data: bytes, path: str, err: ValidationError) -> errors.Corrupt:
    try:
        schema = json.loads(data)["crust"]["schema"]
    except (ValueError, LookupError, TypeError, RecursionError):
        schema = 0
    if not isinstance(schema, int) or schema <= SCHEMA:
        return UnreadableHandoffRecord(path, reasons(err))
    return errors.Corrupt.named(
        "NewerHandoffSchema",
        f"the record {path} cannot be read",
        why=f"its schema is {schema}, and this version of crust reads up to {SCHEMA}",
    )
