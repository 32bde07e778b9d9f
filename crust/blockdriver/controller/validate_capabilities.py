"""ValidateVolumeCapabilities: whether a volume has what a CO states of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import errors, volumes
from crust.blockdriver.controller import io_limit_parameters, parameters
from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.records import Records


@dataclass(frozen=True, slots=True)
class Validation:
    """Compares a volume with what a CO states."""

    volume_records: Records[VolumeRecord]
    content_records: Records[ContentRecord]
    supported: SupportedCapabilities
    provisioning: Provisioning

    def why_not(
        self,
        volume_id: volumes.VolumeId,
        capabilities: tuple[volumes.VolumeCapability, ...],
        context: Mapping[str, str],
        sent_parameters: Mapping[str, str],
        sent_mutable: Mapping[str, str],
    ) -> str:
        """The reason why the volume does not match the request; empty if it does. Blocks.

        Raises `VolumeNotFound`, `ImageMissing`, `ForeignImage`.
        """
        record = self.volume_records.load(volume_id)
        self.provisioning.check_image(volume_id)
        for capability in capabilities:
            if why := self.supported.obstacle(capability) or self._mismatch(record, capability):
                return why
        recorded = parameters.Parameters("", record.parameters)
        if context and parameters.without_sidecars(context) != recorded.volume_context:
            return "the volume has another volume_context"
        try:
            sent = parameters.parse(sent_parameters, self.supported.fs_types)
            limits = io_limit_parameters.parse(sent_mutable)
        except errors.InvalidRequest as err:
            return str(err)
        if io_limit_parameters.changed(record.io_limits, limits) != record.io_limits:
            return "the volume has other mutable_parameters now"
        if sent_parameters and sent.kept != record.parameters:
            return "the volume was created with other parameters"
        return ""

    def _mismatch(self, record: VolumeRecord, capability: volumes.VolumeCapability) -> str:
        access = capability.access
        if isinstance(access, volumes.BlockAccess) or not access.fs_type:
            return ""
        known = self.content_records.load(volumes.VolumeId(record.volume_id))
        present = capability_check.wanted_fs_type(volumes.MountAccess(), record, known.fs_type)
        return "" if access.fs_type == present else f"the volume's filesystem is {present}"
