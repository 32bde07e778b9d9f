"""The checks of a publish request, on the host and to guests alike."""

from dataclasses import dataclass, replace

from crust import deferral_keys, volumes
from crust.blockdriver.engines.protocol import Attachment, NoHostDevice
from crust.blockdriver.node.live_volumes import LiveVolumes, NotStaged
from crust.blockdriver.node.node_state import NodeState, Published
from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records import capability_check, published_nodes
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.records import Records


@dataclass(frozen=True, slots=True)
class Ready:
    """A publish that passed all checks, with what it needs."""

    request: Publish
    entry: Published
    record: VolumeRecord
    content: ContentRecord
    attachment: Attachment
    present: Published | None
    others: tuple[Published, ...]

    @property
    def device(self) -> str:
        """The device's path on this host."""
        return self.attachment.host_device.path

    def on(self, attachment: Attachment) -> "Ready":
        """The same, of a volume that was attached otherwise since."""
        return replace(self, attachment=attachment)


@dataclass(frozen=True, slots=True)
class PublishCheck:
    """Checks a publish against all rules; changes nothing."""

    volume_records: Records[VolumeRecord]
    content_records: Records[ContentRecord]
    node_state: NodeState
    live: LiveVolumes
    supported: SupportedCapabilities

    def check(self, request: Publish) -> Ready:
        """Raises `NoHostDevice`, and what `check_rules` does."""
        ready = self.check_rules(request)
        if not request.deferred and ready.attachment.device is None:
            raise NoHostDevice()
        return ready

    def check_rules(self, request: Publish) -> Ready:
        """All but the device. Raises `models.VolumeNotFound`, `models.RecordMissing`,
        `deferral_keys.EncryptedOnHost`, `deferral_keys.FilesystemOfGuest`,
        `capability_check.CapabilityExceeded`, `NotStaged`, `publish_rules.TargetPublishedDifferently`,
        `publish_rules.PublishedElsewhere`.
        """
        self.live.access.use(request.volume_id, request.secrets)
        record = self.volume_records.load(request.volume_id)
        content = self.content_records.load(request.volume_id)
        if not request.deferred:
            is_block = isinstance(request.capability.access, volumes.BlockAccess)
            deferral_keys.check_host_publish(
                request.volume_id, record.parameters, is_block=is_block
            )
        if why := self.supported.obstacle(request.capability):
            raise capability_check.CapabilityExceeded(request.volume_id, why)
        attachment = self.live.staged_attachment(request.volume_id)
        staged = self.node_state.staged(request.volume_id)
        if staged is None or request.staging.text not in staged.paths:
            raise NotStaged(request.volume_id, f"not at {request.staging}")
        entry = publish_rules.entry_of(request, staged.fs_type)
        if published_nodes.is_readonly(record):
            entry = entry.model_copy(update={"readonly": True})
        if entry.kind != staged.kind:
            raise capability_check.CapabilityExceeded(
                request.volume_id, f"it is staged as {staged.kind}"
            )
        present = self.live.published(request.target)
        if present is not None:
            publish_rules.check_same_target(present, entry)
        live = self.live.live_publishes(request.volume_id)
        others = tuple(each for each in live if each.target != request.target.text)
        publish_rules.check_other_targets(others, entry)
        return Ready(request, entry, record, content, attachment, present, others)
