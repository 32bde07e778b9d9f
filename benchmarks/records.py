"""Valid records of volumes that do not exist, for measuring the handoff directory."""

from crust.core import volumes
from crust.handoff.record import Record
from examples.kata.demo.node import DRIVER, HANDLER

TARGETS = "/var/lib/kubelet"


def record(number: int) -> Record:
    """The record of volume `number`, its target as a kubelet would name it."""
    target = f"{TARGETS}/pods/{number:08x}-0000-4000-8000-000000000000/volumes/kubernetes.io~csi/data/mount"
    mount = volumes.DeferredMount(
        source=volumes.BlockSource(
            f"/dev/loop{number}", volumes.DeviceIdentity(7, number, number + 1)
        ),
        fs_type="ext4",
        mount_options=("noatime",),
        group=volumes.GroupChange(3000, volumes.GroupPolicy.ON_ROOT_MISMATCH),
        capacity_bytes=1 << 30,
        content_generation=1,
    )
    key = volumes.VolumeKey(volumes.DriverName(DRIVER), volumes.VolumeId(f"vol-{number:08x}"))
    return Record.of(mount, key, volumes.TargetPath.parse(target), volumes.HandlerName(HANDLER))
