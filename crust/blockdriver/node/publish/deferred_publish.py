"""NodePublishVolume with deferral: mounts nothing, and returns the data by which a guest mounts the volume.

This is the driver's part of the reservation (one kernel at a time): no host mount of the device, no other deferred
publish, no holder of the device. Read-only sharing is the exception. Then the host's filesystem instance must be
read-only too, because a writable instance keeps a journal that a reading guest would find dirty.
"""

import os
from dataclasses import dataclass, replace

from crust.blockdriver.node import io_limits
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.node.publish.publish_rules import Publish, Ready
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.block import devices, users


@dataclass(frozen=True, slots=True)
class DeferredNodePublish:
    """Publishes volumes to guests. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    host_image: HostImage

    def publish_to_guest(self, request: Publish) -> volumes.DeferredMount:
        """Publish the volume to a guest; an existing publish at this target is a success.

        Raises `CannotDeferRawBlock`, `RootGroupNotDeferrable`, the errors of `publish_rules.check_publish`,
        `DeviceMountedOnHost`, `holders.DeviceInUse`, `PassphraseMissing`, `CephKeyMissing`. Blocks.
        """
        access = request.capability.access
        if not isinstance(access, volumes.MountAccess):
            raise deferral_keys.raw_block_volume()
        if access.group is not None and access.group.gid == 0:
            raise errors.InvalidRequest.named(
                "RootGroupNotDeferrable",
                f"{request.volume_id} cannot be published with deferral",
                why="its group is 0, which runtimes treat as no group",
                hint=(
                    "correct fsGroup in the pod's security context, or publish it without deferral"
                ),
            )
        ready = publish_rules.check_publish(self.stores, request)
        if ready.staged.host and self.host_image.give_back(ready):
            ready = publish_rules.check_publish(self.stores, request)
        mount = _describe(ready, access.group)
        source = ready.attachment.source
        if not isinstance(source, volumes.NetworkImage) and users.is_held(source):
            users.check_mounts_here(source, readonly=ready.entry.readonly)
            if ready.present is None and not ready.entry.readonly:
                # The holder of the device is a guest whose publish this driver lost, or another program.
                os.close(devices.open_exclusive(source.path))
        if ready.present is None:
            self._note(ready)
        return mount

    def _note(self, ready: Ready) -> None:
        content, limits = ready.content, ready.record.limits.value
        if not ready.entry.readonly and (not content.in_guest or content.growth_refused):
            # before a guest can write: its filesystem is not mounted on the host like one of the host
            self.stores.content_records.save(content.but(in_guest=True, growth_refused=""))
        if limits != io_limits.NONE:
            # Limits that a host mount left until the unstage would slow the hypervisor too.
            self.io_limits.settle(limits, ready.attachment)
        self.stores.node_state.note_published(ready.entry)


def _describe(ready: Ready, group: volumes.GroupChange | None) -> volumes.DeferredMount:
    """The data for the guest: an image goes with its user, and its key and a passphrase are secrets.

    The guest makes the filesystem of a volume that was created empty and that no pod had as a raw device. The content
    stays "new" while guests have it: the first guest may end before it has made a filesystem. The guest looks whether
    the device is blank. Raises `PassphraseMissing`, `CephKeyMissing`.
    """
    volume_id, sent, secrets = ready.entry.volume_id, ready.request.secrets, {}
    source, parameters = ready.attachment.source, ready.record.parameters
    in_guest = deferral_keys.formats_in_guest(ready.content.keys)
    if isinstance(source, volumes.NetworkImage):
        in_guest = True  # this host has no device
        user, secrets[deferral_keys.USER_KEY] = deferral_keys.ceph_user(volume_id, sent)
        source = replace(source, user=user)
    encryption = deferral_keys.encryption(ready.content.keys)
    if encryption is not None:
        secrets[deferral_keys.PASSPHRASE] = deferral_keys.passphrase(volume_id, sent)
    is_empty = ready.content.state == "new" and ready.record.content_source is None
    parameters_when_empty = {**parameters, deferral_keys.CREATED_EMPTY: "true"}
    return volumes.DeferredMount(
        source=source,
        fs_type=ready.entry.fs_type,
        mount_options=ready.entry.options,
        group=group,
        readonly=ready.entry.readonly,
        capacity_bytes=ready.attachment.size_bytes,
        content_generation=ready.content.generation,
        io_limits=ready.record.limits.value,
        format=deferral_keys.guest_format(parameters_when_empty) if in_guest and is_empty else None,
        encryption=encryption,
        secrets=secrets,
    )
