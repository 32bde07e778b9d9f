"""What a volume needs of a runtime beyond mounting it, and the refusal if the runtime does not offer that.

The proxy checks the same at the publish. A runtime may have been restarted with fewer features since, and a group
that a CO gave to the guard mount (H-38) is known only when the volume is claimed. A need that nobody checks is
ignored silently: no limits, files that the pod cannot read, a filesystem that is never made.
"""

from collections.abc import Collection, Iterator

from crust.core import errors, volumes
from crust.handoff.record import Record

Feature = volumes.HandlerFeature


def check(record: Record, offered: Collection[Feature]) -> None:
    """Raise `FeatureMissing` for the first thing that the volume needs and that is not offered."""
    for feature, what in _needs(record):
        if feature not in offered:
            raise errors.NotReady.named(
                "FeatureMissing",
                f"the volume at {record.target} cannot be used by {record.handler}",
                why=f"{what}, and the runtime does not offer {feature.name}",
                hint="publish the volume without that, or use a runtime that offers the feature",
            )


def _needs(record: Record) -> Iterator[tuple[Feature, str]]:
    mount = record.mount
    if record.readonly:
        yield Feature.READ_ONLY, "it is published read-only"
    if mount.group is not None and not record.readonly:
        yield Feature.GROUP, f"its files belong to group {mount.group.gid} (fsGroup)"
    if mount.io_limits != volumes.IoLimits():
        yield Feature.IO_LIMITS, "it has I/O limits"
    if mount.format is not None and not record.readonly:
        yield Feature.FORMAT, "it was created empty, so its filesystem may have to be made"
    if mount.image is not None:
        yield Feature.NETWORK_IMAGE, f"it is the image {mount.image} of a Ceph cluster"
    if mount.encryption is not None:
        yield Feature.LUKS, "it is encrypted"
