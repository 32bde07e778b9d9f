"""NodePublishVolume with deferral: mounts nothing, and returns the data by which a guest mounts the volume.

This is the driver's part of the reservation (one kernel at a time): no host mount of the device, no other deferred
publish, no holder of the device. Read-only sharing is the exception. Then the host's filesystem instance must be
read-only too, because a writable instance keeps a journal that a reading guest would find dirty.
"""

import os
from dataclasses import dataclass, replace

from crust.blockdriver.host.throttling import NONE
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.block import devices, users
from crust.host.filesystems import log_replay
from crust.host.mounts import mount_api


@dataclass(frozen=True, slots=True)
class DeferredNodePublish:
    """Publishes volumes to guests. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits
    host_image: HostImage

    def publish_to_guest(self, request: publish_rules.Publish) -> volumes.DeferredMount:
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
            )
        admitted = publish_rules.check_publish(self.stores, request)
        if admitted.staged.host and self.host_image.give_back(admitted):
            admitted = publish_rules.check_publish(self.stores, request)
        mount = _describe(admitted, access.group)
        source = admitted.attachment.source
        if not isinstance(source, volumes.NetworkImage) and users.is_held(source):
            users.check_mounts_here(source, readonly=admitted.entry.readonly)
            if admitted.present is None and not admitted.entry.readonly:
                # The holder of the device is a guest whose publish this driver lost, or another program.
                os.close(devices.open_exclusive(source.path))
        elif not isinstance(source, volumes.NetworkImage):
            content, fs_type = admitted.content, admitted.entry.fs_type
            is_formatted = (content.format_in, content.state) == ("host", "formatted")
            is_ours = is_formatted and not content.in_guest
            if admitted.entry.readonly and is_ours and log_replay.is_due(source.path, fs_type):
                # the log that a snapshot has, for a reading guest, which cannot; never a log that a guest wrote
                os.close(mount_api.open_root(source.path, fs_type))
        if admitted.present is None:
            self._note(admitted)
        return mount

    def _note(self, admitted: publish_rules.AdmittedPublish) -> None:
        content, limits = admitted.content, admitted.record.limits.value
        nobody_grows = admitted.request.nobody_grows
        is_known = content.in_guest and content.nobody_grows == nobody_grows
        if not admitted.entry.readonly and (not is_known or content.growth_refused):
            # before a guest can write: its filesystem is not mounted on the host like one of the host
            changes = {"in_guest": True, "growth_refused": "", "nobody_grows": nobody_grows}
            self.stores.content_records.save(content.replaced(**changes))
        if limits != NONE:
            # Limits that a host mount left until the unstage would slow the hypervisor too.
            self.io_limits.settle(limits, admitted.attachment)
        self.stores.node_state.note_published(admitted.entry)


def _describe(
    admitted: publish_rules.AdmittedPublish, group: volumes.GroupChange | None
) -> volumes.DeferredMount:
    """The data for the guest: an image goes with its user, and its key and a passphrase are secrets.

    The guest makes the filesystem of a volume that was created empty and that no pod had as a raw device. The content
    stays "new" while guests have it: the first guest may end before it has made a filesystem. The guest looks whether
    the device is blank. Raises `PassphraseMissing`, `CephKeyMissing`.
    """
    volume_id, sent, secrets = admitted.entry.volume_id, admitted.request.secrets, {}
    source, parameters = admitted.attachment.source, admitted.record.parameters
    in_guest = admitted.content.format_in != "host"
    if isinstance(source, volumes.NetworkImage):
        in_guest = True  # this host has no device
        user, secrets[deferral_keys.USER_KEY] = deferral_keys.ceph_user(volume_id, sent)
        source = replace(source, user=user)
    encryption = volumes.Encryption.LUKS if admitted.content.format_in == "luks" else None
    if encryption is not None:
        secrets[deferral_keys.PASSPHRASE] = deferral_keys.passphrase(volume_id, sent)
    is_empty = admitted.content.state == "new" and admitted.record.content_source is None
    parameters_when_empty = {**parameters, deferral_keys.CREATED_EMPTY: "true"}
    return volumes.DeferredMount(
        source=source,
        fs_type=admitted.entry.fs_type,
        mount_options=admitted.entry.options,
        group=group,
        readonly=admitted.entry.readonly,
        capacity_bytes=admitted.attachment.size_bytes,
        content_generation=admitted.content.generation,
        io_limits=admitted.record.limits.value,
        format=deferral_keys.guest_format(parameters_when_empty) if in_guest and is_empty else None,
        encryption=encryption,
        secrets=secrets,
    )
