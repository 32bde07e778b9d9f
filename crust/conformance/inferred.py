"""What no capability says, so that the suite tries it out: a CreateVolume that is refused means "has not".

The volumes are deleted at once. What the operator gives is not tried.
"""

import secrets as tokens
from collections.abc import Collection
from dataclasses import dataclass, replace

from crust.conformance.capabilities import BLOCK, CHECKS_FS_TYPE, CREATE
from crust.conformance.options import Options
from crust.conformance.orchestrator.calls import Calls, Channels, Refusal
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.wire.csi.v1 import csi_pb2

_USUAL = "ext4"


@dataclass(frozen=True, slots=True)
class Inferred:
    """The options with all that was left open, what the driver has besides, and what its author should know."""

    options: Options
    has: frozenset[str]
    remarks: tuple[str, ...] = ()


def of(
    channels: Channels, has: frozenset[str], options: Options, needs: Collection[str]
) -> Inferred:
    """Try out what `needs`, those of the chosen cases, ask for."""
    given = options.parameters
    if CREATE not in has:
        found = given.model_copy(update={"fs_types": given.fs_types or (_USUAL,)})
        named = {BLOCK} if given.block else set()
        return Inferred(replace(options, parameters=found), has | named)
    trial = _Trial(channels, options)
    fs_types = given.fs_types or (_USUAL if trial.takes(mount(_USUAL)) else "",)
    if not given.fs_types and not fs_types[0] and not trial.takes(mount()):
        trial.remarks.append(
            f"the driver makes no plain filesystem volume: {trial.refusal}; the settings file may have to name"
            " the parameters, secrets, size_bytes or fs_types that it needs (docs/conformance.md)"
        )
    more = set[str]()
    if given.block or (given.block is None and trial.takes(block(), given.raw_size_bytes)):
        more.add(BLOCK)
    if CHECKS_FS_TYPE in needs and not trial.takes(mount(NO_FILESYSTEM)):
        more.add(CHECKS_FS_TYPE)
    found = given.model_copy(update={"fs_types": fs_types})
    return Inferred(replace(options, parameters=found), has | more, tuple(trial.remarks))


class _Trial(Calls):
    """Creates volumes, and deletes them again."""

    def __init__(self, channels: Channels, options: Options) -> None:
        super().__init__(channels, options.timeout_s)
        self._given = options.parameters
        self.refusal = ""
        self.remarks: list[str] = []

    def takes(self, capability: csi_pb2.VolumeCapability, size_bytes: int = 0) -> bool:
        """Whether a volume can be created for it; `refusal` is the driver's reason."""
        size = csi_pb2.CapacityRange(required_bytes=size_bytes or self._given.size_bytes)
        request = csi_pb2.CreateVolumeRequest(
            name=f"conformance-trial-{tokens.token_hex(6)}",
            volume_capabilities=[capability],
            capacity_range=size,
            parameters=self._given.parameters,
            secrets=self._given.secrets,
        )
        try:
            made = self.until_final(request).volume
        except AssertionError as refusal:
            self.refusal = str(refusal)
            return False
        self._delete(made.volume_id)
        return True

    def _delete(self, volume_id: str) -> None:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id, secrets=self._given.secrets)
        try:
            self.until_final(request)
        except Refusal as refusal:
            self.remarks.append(f"a volume that was created to try the driver is left: {refusal}")
