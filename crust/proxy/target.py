"""One target as the proxy knows it, and every decision about it, as pure functions (docs/decisions/0032).

The proxy observes at a target (`TargetState`): the entry with its claim, on the disk, and the mounts, in the kernel.
It does not remember its calls to the driver: it mounts the guard before it calls the driver, and unmounts the guard
after the driver's unpublish; so a guard or an entry means that the driver may have something.
"""

import enum
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from crust.core import deferral_keys, errors, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff.claims import Claim
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.host.mounts import mount_options, mountinfo
from crust.rpc.messages import csi
from crust.rpc.status import DriverOutcome, Residue, Undo
from crust.wire.csi.v1 import csi_pb2


class MountStack(enum.Enum):
    CLEAR = "nothing is mounted"
    GUARD = "the guard is on top"
    BURIED = "a mount is over the guard"
    FOREIGN = "a mount, and no guard"
    UNSEEN = "entry or target cannot be looked at"


@dataclass(frozen=True, slots=True)
class TargetState:
    entry: Entry | None = None
    stack: MountStack = MountStack.CLEAR
    mount: mountinfo.Mount | None = None
    """The topmost mount, if it is not the guard."""
    problem: Exception | None = None
    """The reason of UNSEEN."""

    @property
    def is_covered(self) -> bool:
        """Whether another mount than the guard is on top."""
        return self.stack in (MountStack.BURIED, MountStack.FOREIGN)

    def mounted(self, target: volumes.TargetPath) -> errors.CrustError:
        """The error about the mount that is on top."""
        mounted = "another filesystem"
        if self.mount is not None:
            mounted = f"{self.mount.source} ({self.mount.fs_type})"
        return errors.NotReady.named(
            "TargetMounted",
            f"{target} cannot be prepared for a deferred mount",
            why=f"{mounted} is mounted there",
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """The state that only a guard mount holds: a restored guard gets it again."""

    group: int
    """Of its root: a kubelet sets it (H-38)."""
    names: bool
    """Whether it takes names (H-39)."""


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One row of the table: the last observation of a target, and the facts that only the proxy remembers."""

    name: str
    """The digest of the path, which is the entry's name; or the unknown name of a file."""
    path: str = ""
    """Empty if an entry does not name it."""
    entry: Entry | None = None
    stack: MountStack = MountStack.CLEAR

    key: volumes.VolumeKey | None = None
    """Also known without an entry, from the publish. None: nobody knows the volume any more."""
    devices: DeviceSet | None = None
    """Reserved besides the volume; None until the driver has reported the device."""
    readonly: bool = False
    handler: volumes.HandlerName | None = None
    busy: bool = False
    """An operation is at work here: its result is newer than a look meanwhile."""
    guard: Guard | None = None
    """The guard that a look saw last."""
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    reported: Claim | None = None
    """The live claim that was reported last."""
    unpublish_refused: bool = False
    """The last unpublish was refused."""
    problems: frozenset[str] = frozenset()
    """The parts that are reported as unhealthy."""

    @classmethod
    def of(cls, path: str, **fields: Any) -> Self:
        """A target of which only the path and these fields are known."""
        return cls(volumes.TargetPath(path).digest, path, **fields)

    @property
    def record(self) -> Record | None:
        return self.entry.record if self.entry is not None else None

    @property
    def is_unreadable(self) -> bool:
        return self.entry is not None and self.entry.record is None


def conflict(
    new: TargetRow, rows: Collection[TargetRow], *, deferred: bool = True
) -> errors.CrustError | None:
    """The error if `new` cannot have its volume or device, `deferred` or on the host, beside all `rows`.

    Two kernels that mount one filesystem read-write destroy it, and no lower layer prevents this. Several readers
    may share a device. A publish on the host reserves nothing: a deferred one asks the kernel for its device's users.
    """
    is_retry = any(
        row.name == new.name and row.record is not None and row.key == new.key for row in rows
    )
    refusal = None if is_retry else unreadable_entry(new.key, rows)
    if refusal is not None:
        return refusal
    for holder in rows:
        shares = holder.key == new.key
        if holder.devices is not None and new.devices is not None:
            shares = shares or holder.devices.shares_bytes_with(new.devices)
        if holder.name == new.name or not shares:
            continue
        if holder.is_unreadable:
            return _unreadable(new.key, holder, f"reserves its device, at {holder.path}")
        if not (new.readonly and holder.readonly):
            way = "published to a runtime" if deferred else "mounted on the host"
            exception = " for writing" if not holder.readonly else ", and only readers may share it"
            pod = holder.record.crust.pod if holder.record is not None else None
            return errors.NotReady.named(
                "DeviceReserved",
                f"volume {new.key} cannot be {way} at {new.path}",
                why=f"its device is published to a runtime at {holder.path}{exception}",
                hint=f"stop the pod {pod or 'that uses it there'}: two kernels writing to one filesystem destroy it",
            )
    return None


def unreadable_entry(
    key: volumes.VolumeKey | None, rows: Iterable[TargetRow]
) -> errors.CrustError | None:
    """The error if an unreadable entry has the volume, or if nobody knows which device the entry reserves."""
    for row in rows:
        if row.entry is None or row.entry.record is not None:
            continue
        if row.key == key:
            return _unreadable(key, row, f"has this volume, at {row.path}")
        if row.devices is None and not isinstance(row.entry.error, UnknownHandoffFile):
            unknown = "whose it is" if row.key is None else "which device it has"
            return _unreadable(key, row, f"does not say {unknown}")
    return None


def _unreadable(key: volumes.VolumeKey | None, holder: TargetRow, why: str) -> errors.CrustError:
    """The error about an unreadable entry that reserves, or may reserve, the volume or its device."""
    directory = holder.entry.directory if holder.entry is not None else holder.path
    return errors.NotReady.named(
        "ReservedByUnreadableEntry",
        f"volume {key} may be in use by a runtime",
        why=f"the entry {directory} cannot be read, and it {why}",
    )


def other_volume(
    target: str, key: volumes.VolumeKey, present: volumes.VolumeKey
) -> errors.CrustError:
    """The error about a request for a volume at its target, which is another volume's (CSI: NOT_FOUND)."""
    return errors.NotFound.named(
        "TargetOfOtherVolume",
        f"the request for volume {key} names the target {target}",
        why=f"volume {present} is published there",
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    key: volumes.VolumeKey
    target: volumes.TargetPath
    access: volumes.MountAccess
    options: tuple[str, ...]
    readonly: bool
    digest: str = ""
    """Of the request (`request_digest`)."""
    encryption: volumes.Encryption | None = None
    is_inline: bool = False
    """A volume of the pod itself, which its unpublish deletes."""
    pod: str = ""
    """The pod's namespace and name, where the CO says them."""
    grows_on_host: bool = False
    """Whether its class consents to a host that grows the filesystem."""

    @classmethod
    def of(cls, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest) -> Self:
        """Decode; raises `errors.InvalidRequest`, `deferral_keys.InvalidDeferKey`."""
        target = volumes.TargetPath.parse(request.target_path)
        capability = csi.capability(request.volume_capability)
        assert isinstance(capability.access, volumes.MountAccess)  # the policy defers no other
        if capability.access.group is not None:
            # root's, which a CO may delegate, is for a host mount alone (D-5)
            volumes.GroupChange.parse(str(capability.access.group.gid))
        options = mount_options.parse(capability.access.mount_flags, for_guest=True)
        context = request.volume_context
        return cls(
            key,
            target,
            capability.access,
            options,
            csi.is_readonly(request),
            request_digest(request),
            encryption=deferral_keys.encryption(context),
            is_inline=deferral_keys.is_inline(context, key.volume_id),
            pod="/".join(filter(None, map(context.get, deferral_keys.POD_NAMES))),
            grows_on_host=deferral_keys.grows_on_host(context),
        )


def request_digest(request: csi_pb2.NodePublishVolumeRequest) -> str:
    """A digest of the CO's own parts of a publish: equal if the CO repeats it, also with fresh tokens.

    Other parts may differ in a repeat: secrets; a kubelet's keys about the pod; the publish context, which the attach
    has answered; the staging path, which another version of a kubelet chooses otherwise. For the policy of a group it
    is the same result.
    """
    capability, context = request.volume_capability, request.volume_context
    mount = capability.mount
    parts = [
        request.volume_id,
        request.target_path,
        request.readonly,
        request.defer_fs_ops,
        capability.access_mode.mode,
        capability.WhichOneof("access_type"),
        mount.fs_type,
        list(mount.mount_flags),
        mount.volume_supplemental_group or mount.volume_mount_group,
        sorted(
            pair for pair in context.items() if not pair[0].startswith(deferral_keys.KUBERNETES)
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class PublishPlan(enum.Enum):
    DEFER = "admit, mount the guard, call the driver, write the entry"
    RENEW = "call the driver, rewrite the record"
    CLEAN_FIRST = "the driver's unpublish, unmount the guard; then DEFER"
    REFUSE = "refuse"


def publish_plan(seen: TargetState, wanted: Wanted) -> PublishPlan:
    if seen.stack is MountStack.UNSEEN:
        return PublishPlan.REFUSE
    if seen.entry is not None:
        record = seen.entry.record
        if record is None or not record.same_publish(wanted.key, wanted.digest):
            return PublishPlan.REFUSE
        return PublishPlan.REFUSE if seen.is_covered else PublishPlan.RENEW
    if seen.stack is MountStack.BURIED and not wanted.is_inline:
        return PublishPlan.CLEAN_FIRST
    return PublishPlan.REFUSE if seen.is_covered else PublishPlan.DEFER


def must_be_made(
    began: TargetState, mount: volumes.DeferredMount, features: Collection[HandlerFeature]
) -> bool:
    """Whether the proxy makes the filesystem on a blank device: the volume was created empty, and the handler does
    not format. If there is an entry, the proxy never does: a sandbox may have the device.
    """
    is_asked = mount.format is not None and HandlerFeature.FORMAT not in features
    return began.entry is None and is_asked and not mount.needs_secrets


def must_be_grown(
    began: TargetState,
    wanted: Wanted,
    mount: volumes.DeferredMount,
    features: Collection[HandlerFeature],
) -> bool:
    """Whether the proxy grows the filesystem: the class consents, the handler does not, and there is no entry."""
    is_asked = wanted.grows_on_host and HandlerFeature.GROW not in features
    return began.entry is None and is_asked and not mount.needs_secrets and not mount.readonly


def undo_plan(began: TargetState, outcome: DriverOutcome, *, is_inline: bool) -> Undo:
    """The undo of a failed publish: never of anything that stood before the call.

    An inline volume is not unpublished: that deletes it, and it may have been the pod's before a reboot (D-10).
    """
    if began.entry is not None or outcome is DriverOutcome.SILENT:
        return Undo.NOTHING
    if outcome is DriverOutcome.ANSWERED:
        return Undo.NOTHING if is_inline else Undo.UNPUBLISH
    if began.stack is MountStack.CLEAR:
        return Undo.REMOVE
    return Undo.UNPUBLISH if outcome is DriverOutcome.REFUSED and not is_inline else Undo.NOTHING


def residue_of(seen: TargetState, wanted: Wanted) -> Residue:
    """The residue of the volume that the call names, from an observation alone."""
    if seen.stack is MountStack.UNSEEN:
        return Residue.EXISTS
    if seen.entry is None:
        return Residue.NONE if seen.stack is MountStack.CLEAR else Residue.EXISTS
    record = seen.entry.record
    if record is None:
        return Residue.EXISTS
    if record.key != wanted.key:
        return Residue.NONE
    return residue_beside(record, wanted.digest)


def residue_beside(record: Record | None, digest: str) -> Residue:
    """The residue for a publish at a target that is deferred. It has other arguments only if the record says so."""
    request = record.crust.request if record is not None else None
    return Residue.EXISTS if request in (None, digest) else Residue.OTHER


def row_after_failure(row: TargetRow, seen: TargetState) -> TargetRow | None:
    """The row after an operation that did not end in a deferred publish, from an observation; None: FREE."""
    if seen.stack is MountStack.UNSEEN:
        return replace(row, stack=MountStack.UNSEEN, busy=False)
    if seen.entry is None and seen.stack in (MountStack.CLEAR, MountStack.FOREIGN):
        return None
    return replace(row, entry=seen.entry, stack=seen.stack, busy=False)


class UnpublishPlan(enum.Enum):
    REMOVE = "the driver's unpublish, hide the entry, unmount the guard, delete"
    CLEAN = "the driver's unpublish, unmount the guard if there is one"
    DRIVER = "the driver's unpublish, of its own mount"
    REFUSE = "refuse"


def unpublish_plan(seen: TargetState, key: volumes.VolumeKey) -> UnpublishPlan:
    if seen.stack is MountStack.UNSEEN:
        return UnpublishPlan.REFUSE
    if seen.entry is not None:
        # an undo needs no more of a record: its device can be asked about
        reserved = seen.entry.reservation
        is_known = reserved is not None and reserved.key == key and reserved.device is not None
        return UnpublishPlan.REMOVE if is_known and not seen.entry.live else UnpublishPlan.REFUSE
    return UnpublishPlan.DRIVER if seen.stack is MountStack.FOREIGN else UnpublishPlan.CLEAN


def lost_its_group(row: TargetRow) -> bool:
    """Whether a sandbox would need the group of a lost guard, and nobody knows it any more.

    A group of the record reaches the guest without the guard, and a read-only volume has none (H-12, H-38).
    """
    record = row.record
    if record is None or record.mount.group is not None or record.readonly:
        return False
    return row.guard is None


def group_unknown(target: str) -> errors.CrustError:
    return errors.NotReady.named(
        "GuardGroupUnknown",
        f"the group of the volume at {target} is not known any more",
        why="its guard mount was lost before the proxy had seen the group that the kubelet gave it, and was restored "
        "without one: a sandbox would mount the volume without the pod's fsGroup",
    )


def needs_guard(row: TargetRow) -> bool:
    """Whether a look mounts the guard again; with another mount on top it fails, and reports that."""
    return row.record is not None and row.stack is not MountStack.GUARD
