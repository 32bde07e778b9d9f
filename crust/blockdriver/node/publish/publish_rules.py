"""The checks of a publish, on the host and to guests, and the publishes of one volume that may exist together (CSI).

    mode                            same target, same P   same target, other P   other target
    MULTI_NODE_*, …_MULTI_WRITER    success               ALREADY_EXISTS         success, same capability
    the other SINGLE_NODE_*         success               ALREADY_EXISTS         FAILED_PRECONDITION

P is every argument but the secrets and the keys `csi.storage.k8s.io/…` of the contexts: a kubelet puts pod names and
fresh tokens there and publishes again. Deferral adds a rule, because two kernels could mount one device: a deferred
publish excludes all others, unless it and all the others are read-only.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from crust.blockdriver.engines.pool_access import Attachment
from crust.blockdriver.records import capability_check, models
from crust.blockdriver.records.node_state import NotStaged, Published, Staged
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.mounts import mount_options

_SHARED_MODES = frozenset({
    volumes.AccessMode.MULTI_NODE_READER_ONLY, volumes.AccessMode.MULTI_NODE_SINGLE_WRITER,
    volumes.AccessMode.MULTI_NODE_MULTI_WRITER, volumes.AccessMode.SINGLE_NODE_MULTI_WRITER,
})  # fmt: skip


class TargetPublishedDifferently(errors.Conflict):
    def __init__(self, target: str, volume_id: str) -> None:
        super().__init__(
            f"{volume_id} is published at {target} already", why="with other arguments than these"
        )


@dataclass(frozen=True, slots=True)
class Publish:
    """A NodePublishVolume. `staging` is its staging path; the contexts are never logged."""

    volume_id: volumes.VolumeId
    target: volumes.TargetPath
    staging: volumes.TargetPath
    capability: volumes.VolumeCapability
    readonly: bool
    deferred: bool
    volume_context: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Sorted, as the publish context."""
    publish_context: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The secrets of the publish, or the known ones of the stage."""
    nobody_grows: bool = field(default=False, compare=False)
    """Whether neither the guest nor the proxy grows the volume's filesystem."""
    fingerprint: str = field(init=False, repr=False, compare=False)
    """A digest of P: equal for equal requests, without their content."""

    def __post_init__(self) -> None:
        access = self.capability.access
        mount = access if isinstance(access, volumes.MountAccess) else None
        group = mount.group if mount else None
        arguments = [
            self.volume_id,
            self.staging.text,
            self.capability.mode.value,
            [mount.fs_type, list(mount.mount_flags)] if mount else None,
            # Not the policy: it changes how long the change takes, not its result. Earlier versions wrote this word.
            [group.gid, volumes.GroupPolicy.ALWAYS.value] if group else None,
            self.readonly,
            self.deferred,
            *(
                [pair for pair in context if not pair[0].startswith(deferral_keys.KUBERNETES)]
                for context in (self.volume_context, self.publish_context)
            ),
        ]
        fingerprint = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
        object.__setattr__(self, "fingerprint", fingerprint)


def entry_of(request: Publish, fs_type: str, *, readonly: bool = False) -> Published:
    """The entry for `request`, of a volume that may be `readonly` here. Raises the errors of `mount_options`."""
    access = request.capability.access
    kind: Literal["mount", "block"] = "block"
    flags: tuple[str, ...] = ()
    if isinstance(access, volumes.MountAccess):
        kind, flags = "mount", access.mount_flags
    options = mount_options.parse(flags, for_guest=request.deferred)
    context = dict(request.volume_context)
    if fs_type == "xfs" and "nouuid" not in options:  # see `crust.host.mounts.mount_api`
        options = (*options, "nouuid")
    mode = request.capability.mode
    return Published(
        volume_id=request.volume_id,
        target=request.target.text,
        kind=kind,
        fs_type=fs_type if kind == "mount" else "",
        mode=mode.value,
        options=options,
        readonly=readonly or request.readonly or mode.reader_only or mount_options.readonly(flags),
        deferred=request.deferred,
        fingerprint=request.fingerprint,
        done=request.deferred,  # no step follows its entry
        pod="/".join(filter(None, map(context.get, deferral_keys.POD_NAMES))),
    )


def check_other_targets(others: Iterable[Published], entry: Published) -> None:
    """Raise `PublishedElsewhere` if a publish at another target forbids this one."""
    mode = volumes.AccessMode(entry.mode)
    for other in others:
        readonly = other.readonly and entry.readonly
        if other.deferred and not readonly:
            obstacle = "a guest mounts it, and two kernels must not write to one filesystem"
        elif entry.deferred and not readonly:
            obstacle = "this host mounts it, and a guest must not write to it at the same time"
        elif mode not in _SHARED_MODES:
            obstacle = f"{mode.name} allows one target"
        elif (other.kind, other.fs_type, other.mode) != (entry.kind, entry.fs_type, entry.mode):
            obstacle = "with another capability"
        elif other.deferred == entry.deferred and other.options != entry.options:
            obstacle = "with other mount options, and a filesystem has only one set"
        elif other.kind == "block" and other.readonly != entry.readonly:
            obstacle = "a raw device is read-only at all targets or at none"
        else:
            continue
        raise errors.NotReady.named(
            "PublishedElsewhere",
            f"{entry.volume_id} is published at {other.target}",
            why=obstacle,
            hint=f"stop the pod {other.pod or 'that uses it there'}",
        )


@dataclass(frozen=True, slots=True)
class AdmittedPublish:
    """A publish that passed all checks, with its records and attachment."""

    request: Publish
    entry: Published
    staged: Staged
    record: models.VolumeRecord
    content: models.ContentRecord
    attachment: Attachment
    present: Published | None
    others: tuple[Published, ...]


def check_publish(stores: Stores, request: Publish) -> AdmittedPublish:
    """Check a publish against all rules but one, whether this host has a device; changes no state.

    Raises `models.VolumeNotFound`, `models.RecordMissing`, `EncryptedOnHost`, `FilesystemOfGuest`,
    `capability_check.CapabilityExceeded`, `NotStaged`, `TargetPublishedDifferently`, `PublishedElsewhere`.
    """
    volume_id = request.volume_id
    stores.access.use(volume_id, request.secrets)
    record, content = stores.volume_records.load(volume_id), stores.content_records.load(volume_id)
    if not request.deferred:
        is_block = isinstance(request.capability.access, volumes.BlockAccess)
        deferral_keys.check_host_publish(volume_id, content.format_in, is_block=is_block)
    if why := stores.supported.obstacle(request.capability):
        raise capability_check.CapabilityExceeded(volume_id, why)
    staged, attachment = _staged(stores, request)
    published_readonly = any(node.readonly for node in record.nodes)
    entry = entry_of(request, staged.fs_type, readonly=published_readonly)
    if entry.kind != staged.kind:
        raise capability_check.CapabilityExceeded(volume_id, f"it is staged as {staged.kind}")
    live = stores.node_state.live_publishes(volume_id)
    present = stores.node_state.published(request.target)
    live_of_its_volume = live
    if present is not None and present.volume_id != volume_id:
        live_of_its_volume = stores.node_state.live_publishes(present.volume_id)
    if present not in live_of_its_volume:
        present = None
    if present is not None and present.fingerprint != entry.fingerprint:
        raise TargetPublishedDifferently(present.target, present.volume_id)
    others = tuple(publish for publish in live if publish.target != request.target.text)
    check_other_targets(others, entry)
    return AdmittedPublish(request, entry, staged, record, content, attachment, present, others)


def _staged(stores: Stores, request: Publish) -> tuple[Staged, Attachment]:
    """The stage at the request's staging path, and its device. Raises `NotStaged`."""
    staged = stores.node_state.of(request.volume_id).stage
    if staged is None:
        raise NotStaged(request.volume_id)
    attachment = stores.access.attached(request.volume_id)
    if attachment is None:
        raise NotStaged(request.volume_id, "its device was detached by another program")
    if request.staging.text not in staged.paths:
        raise NotStaged(request.volume_id, f"not at {request.staging}")
    return staged, attachment
