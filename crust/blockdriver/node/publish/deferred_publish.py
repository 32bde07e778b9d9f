"""NodePublishVolume with deferral: mounts nothing, and returns what a guest needs to mount the volume.

The driver's part of the reservation (one kernel at a time) is here: no host mount of the device, no other deferred
publish, no holder of the device. Read-only sharing is the exception. Then the host's filesystem instance must be
read-only too, because a writable one keeps a journal that a reading guest would find dirty.
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
from crust.host.block import devices, in_use
from crust.host.mounts import device_mounts


@dataclass(frozen=True, slots=True)
class DeferredNodePublish:
    """Publishes volumes to guests. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    host_image: HostImage

    def publish(self, request: Publish) -> volumes.DeferredMount:
        """Publish the volume to a guest; published at this target already is a success.

        Raises `CannotDeferRawBlock`, `RootGroupNotDeferrable`, what `publish_rules.check` raises,
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
        ready = publish_rules.check(self.stores, request)
        if ready.staged.host and self.host_image.give_back(ready):
            ready = publish_rules.check(self.stores, request)
        mount = _describe(ready, access.group)
        device = ready.attachment.device
        is_free = device is None or devices.is_free(device.path, device.identity)
        if not is_free:
            _check_host(ready)
        if ready.present is None:
            self._note(ready, is_free=is_free)
        return mount

    def _note(self, ready: Ready, *, is_free: bool) -> None:
        content, limits = ready.content, ready.record.limits.value
        if not ready.entry.readonly and not is_free:
            # The holder of the device is a guest whose publish this driver lost, or another program.
            os.close(devices.open_exclusive(ready.attachment.host_device.path))
        if not ready.entry.readonly and (not content.in_guest or content.growth_refused):
            # before a guest can write: its filesystem is not mounted on the host like one of the host
            self.stores.content_records.save(content.but(in_guest=True, growth_refused=""))
        if limits != io_limits.NONE:
            # Limits that a host mount left until the unstage would slow the hypervisor too.
            self.io_limits.settle(limits, ready.attachment)
        self.stores.node_state.note_published(ready.entry)


def _check_host(ready: Ready) -> None:
    mounted = device_mounts.filesystem_mounts(ready.attachment.host_device)
    in_the_way = tuple(
        mount.target
        for mount in mounted
        if not (ready.entry.readonly and "ro" in mount.super_options)
    )
    if in_the_way:
        raise in_use.mounted_on_host(ready.attachment.host_device, in_the_way)


def _format(ready: Ready) -> volumes.GuestFormat | None:
    """How the guest makes the filesystem; None unless the volume was created empty and no pod had it as a raw device.

    It stays "new" while guests have it: the first may be gone before it has made anything. The guest looks whether
    the device is blank.
    """
    parameters = ready.record.parameters
    in_guest = ready.attachment.device is None or deferral_keys.formats_in_guest(parameters)
    if not in_guest or ready.content.state != "new":
        return None
    if ready.record.content_source is not None:
        return None
    return deferral_keys.guest_format({**parameters, deferral_keys.CREATED_EMPTY: "true"})


def _describe(ready: Ready, group: volumes.GroupChange | None) -> volumes.DeferredMount:
    """What the guest needs: an image goes with its user, and its key and a passphrase are secrets.

    Raises `PassphraseMissing`, `CephKeyMissing`.
    """
    volume_id, given, secrets = ready.entry.volume_id, ready.request.secrets, {}
    source = ready.attachment.source
    if isinstance(source, volumes.NetworkImage):
        user, secrets[deferral_keys.USER_KEY] = deferral_keys.ceph_user(volume_id, given)
        source = replace(source, user=user)
    encryption = deferral_keys.encryption(ready.record.parameters)
    if encryption is not None:
        secrets[deferral_keys.PASSPHRASE] = deferral_keys.passphrase(volume_id, given)
    return volumes.DeferredMount(
        source=source if isinstance(source, volumes.NetworkImage) else ready.attachment.host_device,
        fs_type=ready.entry.fs_type,
        mount_options=ready.entry.options,
        group=group,
        readonly=ready.entry.readonly,
        capacity_bytes=ready.attachment.size_bytes,
        content_generation=ready.content.generation,
        io_limits=ready.record.limits.value,
        format=_format(ready),
        encryption=encryption,
        secrets=secrets,
    )
