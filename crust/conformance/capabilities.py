"""What a driver advertises, as one set of names: `controller.LIST_VOLUMES`, `node.EXPAND_VOLUME`, `plugin.ONLINE`.

The catalogue has the names that a case needs. An option that the operator gives has a name too (`option.log`), and so
has what is tried out because no capability says it (`driver.block`).
"""

import secrets as tokens
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import Message

from crust.conformance.options import Options
from crust.conformance.orchestrator.calls import Calls, Channels, Code, Refusal
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2

CREATE = "controller.CREATE_DELETE_VOLUME"
PUBLISH = "controller.PUBLISH_UNPUBLISH_VOLUME"
READONLY = "controller.PUBLISH_READONLY"
CAPACITY = "controller.GET_CAPACITY"
SNAPSHOT = "controller.CREATE_DELETE_SNAPSHOT"
LIST_SNAPSHOTS = "controller.LIST_SNAPSHOTS"
GET_SNAPSHOT = "controller.GET_SNAPSHOT"
CLONE = "controller.CLONE_VOLUME"
EXPAND = "controller.EXPAND_VOLUME"
GROUP = "group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"
METADATA = "plugin.SNAPSHOT_METADATA_SERVICE"
ONLINE = "plugin.ONLINE"
NODE = "node"
STAGE = "node.STAGE_UNSTAGE_VOLUME"
NODE_EXPAND = "node.EXPAND_VOLUME"
BLOCK = "driver.block"
CHECKS_FS_TYPE = "driver.checks-fs-type"
FEW_VOLUMES_MAX = 32
"""An attach limit up to this is tried out."""

_USUAL = "ext4"
_METADATA = ((extensions.KEY, f"{extensions.DEFERRAL},{extensions.NODE_INFO}"),)
_Service = csi_pb2.PluginCapability.Service.Type
_Expansion = csi_pb2.PluginCapability.VolumeExpansion.Type
_SERVICES: dict[str, tuple[Message, object]] = {
    "controller": (
        csi_pb2.ControllerGetCapabilitiesRequest(),
        csi_pb2.ControllerServiceCapability.RPC.Type,
    ),
    "node": (csi_pb2.NodeGetCapabilitiesRequest(), csi_pb2.NodeServiceCapability.RPC.Type),
    "group": (
        csi_pb2.GroupControllerGetCapabilitiesRequest(),
        csi_pb2.GroupControllerServiceCapability.RPC.Type,
    ),
}


def of(channels: Channels, options: Options) -> frozenset[str]:
    """Ask the driver. Raises AssertionError where it does not answer at all."""
    found = {*_advertised(channels, options.timeout_s), *_given(options)}
    return frozenset(found | {f"profile.{options.profile or _profile(found)}"})


def _profile(found: set[str]) -> str:
    """CSI 1.13 removed the volume condition, so a driver that advertises it speaks an older version."""
    return "1.12" if found & {"controller.VOLUME_CONDITION", "node.VOLUME_CONDITION"} else "1.13"


def _advertised(channels: Channels, timeout_s: float) -> Iterable[str]:
    calls = Calls(channels, timeout_s)
    plugin = _served(calls, csi_pb2.GetPluginCapabilitiesRequest())
    for capability in plugin.capabilities if plugin else ():
        if capability.HasField("service"):
            yield f"plugin.{_name(_Service, capability.service.type)}"
        elif capability.HasField("volume_expansion"):
            yield f"plugin.{_name(_Expansion, capability.volume_expansion.type)}"
    for service, (request, rpcs) in _SERVICES.items():
        answer = _served(calls, request)
        if answer is not None:
            yield service
            yield from (
                f"{service}.{_name(rpcs, capability.rpc.type)}"
                for capability in answer.capabilities
            )
        if service == "node":
            yield from _of_info(_served(calls, csi_pb2.NodeGetInfoRequest()))


def _of_info(info: Any) -> Iterable[str]:
    if info is not None:
        yield "node.info"
        if 0 < info.max_volumes_per_node <= FEW_VOLUMES_MAX:
            yield f"node.max_volumes_per_node<={FEW_VOLUMES_MAX}"


def _served(calls: Calls, request: Message) -> Any:
    """The answer, unchecked: what is wrong with it is the cases' matter. None where the RPC is not implemented."""
    try:
        return calls.method(request)(
            request, timeout=calls.timeout_s, metadata=_METADATA, wait_for_ready=True
        )
    except grpc.RpcError as error:
        refusal = Refusal(request, error)
    if refusal.code is not Code.UNIMPLEMENTED:
        raise refusal
    return None


def _given(options: Options) -> Iterable[str]:
    given = options.parameters
    values = {
        "option.profile": options.profile,
        "option.log": options.log,
        "option.restart-command": options.restart_command,
        "parameters.mutable_parameters": given.mutable_parameters,
        "parameters.ephemeral_context": given.ephemeral_context,
        "parameters.multi_node": given.multi_node,
        "parameters.other_node_id": given.other_node_id,
        "parameters.deferral": given.deferral,
    }
    yield from (name for name, value in values.items() if value)


def _name(enum: object, number: int) -> str:
    try:
        return str(enum.Name(number))  # type: ignore[attr-defined]
    except ValueError:
        return str(number)


@dataclass(frozen=True, slots=True)
class Inferred:
    """The options with all that was left open, what the driver has besides, and what its author should know."""

    options: Options
    has: frozenset[str]
    remarks: tuple[str, ...] = ()


def inferred(
    channels: Channels, has: frozenset[str], options: Options, needs: Collection[str]
) -> Inferred:
    """Try out what `needs`, those of the chosen cases, ask for: a CreateVolume that is refused means "has not".

    The volumes are deleted at once. What the operator gives is not tried.
    """
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
            " the parameters, secrets, size_bytes or fs_types that it needs"
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
        super().__init__(channels, options.timeout_s, options.parameters.secrets)
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
        )
        try:
            made = self.until_final(request).volume
        except AssertionError as refusal:
            self.refusal = str(refusal)
            return False
        self._delete(made.volume_id)
        return True

    def _delete(self, volume_id: str) -> None:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        try:
            self.until_final(request)
        except Refusal as refusal:
            self.remarks.append(f"a volume that was created to try the driver is left: {refusal}")
