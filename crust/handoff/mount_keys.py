"""A deferred mount as the keys of mountInfo.json, and back. `crust.handoff.record` has the other keys of a record.

`mount_of` takes a model that pydantic has checked; it raises `errors.InvalidRequest` for what the core types refuse.
"""

from dataclasses import asdict
from typing import Any

from crust.core import volumes
from crust.handoff import mount_info


def without_none(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that have a value: a record has no null."""
    return {key: value for key, value in keys.items() if value is not None}


def of_source(
    source: volumes.BlockSource | volumes.NetworkImage,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outer keys, and those of the object "crust"."""
    if isinstance(source, volumes.NetworkImage):
        return {"volume-type": "network"}, {"image": asdict(source)}
    outer = {"volume-type": "block", "device": source.path}
    return outer, {"identity": source.identity.numbers()}


def of_guest_work(mount: volumes.DeferredMount) -> dict[str, Any]:
    """The keys that a runtime must know, because it must not mount without that work."""
    work: dict[str, Any] = {}
    if mount.format is not None:
        work["format"] = without_none(asdict(mount.format))
    if mount.encryption is not None:
        work["encryption"] = mount.encryption.value
    return work


def of_limits(limits: volumes.IoLimits) -> dict[str, int] | None:
    """The key `limits`; None if there is no limit."""
    return None if limits == volumes.IoLimits() else asdict(limits)


def of_group(group: volumes.GroupChange | None) -> dict[str, str]:
    """The outer key `metadata`."""
    if group is None:
        return {}
    return {"fsGroup": str(group.gid), "fsGroupChangePolicy": group.policy.value}


def mount_of(model: mount_info.MountInfo) -> volumes.DeferredMount:
    """The deferred mount of a record."""
    part = model.crust
    return volumes.DeferredMount(
        source=_source_from(model),
        fs_type=model.fs_type,
        mount_options=tuple(each for each in model.options if each != "ro"),
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
        return None
    policy = metadata.change_policy or volumes.GroupPolicy.ON_ROOT_MISMATCH.value
    return volumes.GroupChange.parse(metadata.fs_group, volumes.GroupPolicy(policy))
