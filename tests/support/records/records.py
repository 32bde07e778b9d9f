"""Builders of handoff records, for tests that care about one field at a time."""

import datetime
from dataclasses import replace

from crust.core import volumes
from crust.handoff.record import Record

TARGET = volumes.TargetPath.parse(
    "/var/lib/kubelet/pods/6f1c/volumes/kubernetes.io~csi/pvc-1/mount"
)
KEY = volumes.VolumeKey(volumes.DriverName("block.csi.crust.dev"), volumes.VolumeId("vol-1"))
HANDLER = volumes.HandlerName("kata")
MOUNT = volumes.DeferredMount(
    source=volumes.BlockSource("/dev/loop7", volumes.DeviceIdentity(7, 7, 42)),
    fs_type="ext4",
    mount_options=("noatime",),
    group=volumes.GroupChange(3000, volumes.GroupPolicy.ON_ROOT_MISMATCH),
    capacity_bytes=1 << 30,
    content_generation=5,
)
IMAGE = volumes.NetworkImage(
    cluster="11111111-2222-3333-4444-555555555555",
    pool="rbd",
    namespace="crust",
    image="vol-1",
    monitors=("v2:192.0.2.1:3300",),
    user="node",
)
PUBLISHED_AT = datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


def a_record(target: volumes.TargetPath | str = TARGET, **mount: object) -> Record:
    """A record whose mount differs from `MOUNT` in the fields that are given."""
    where = volumes.TargetPath.parse(target) if isinstance(target, str) else target
    record = Record.of(replace(MOUNT, **mount), KEY, where, HANDLER)  # type: ignore[arg-type]
    return record.replaced(published_at=PUBLISHED_AT)
