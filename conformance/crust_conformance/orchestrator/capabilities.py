"""A driver's capabilities, as one set of names: `controller.LIST_VOLUMES`, `node.EXPAND_VOLUME`, `plugin.ONLINE`.

The catalogue has the names that a case needs. An option of the operator has a name too (`option.log`), and so has an
ability that the suite tries out, because CSI has no capability for it (`driver.block`). A case that
needs `driver.without-proxy` judges what a crust proxy answers itself.
"""

import secrets as tokens
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import Message

from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust_conformance.options import Options
from crust_conformance.orchestrator.calls import Calls, Channels, Code, Refusal
from crust_conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount

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
CONSTRAINTS = "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS"
SNAPSHOT_CONSTRAINTS = "plugin.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"
METADATA = "plugin.SNAPSHOT_METADATA_SERVICE"
ONLINE = "plugin.ONLINE"
NODE = "node"
STAGE = "node.STAGE_UNSTAGE_VOLUME"
NODE_EXPAND = "node.EXPAND_VOLUME"
BLOCK = "driver.block"
CHECKS_FS_TYPE = "driver.checks-fs-type"
UNPROXIED = "driver.without-proxy"
"""That no crust proxy is in front of it: a proxy answers a deferred publish itself."""
FEW_VOLUMES_MAX = 32
"""The suite tries out an attach limit up to this."""

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


def of_driver(channels: Channels, options: Options) -> frozenset[str]:
    """Ask the driver. Raises AssertionError if it does not answer."""
    names = {*_advertised(channels, options.timeout_s), *_option_names(options)}
    if not _is_proxied(channels, options.timeout_s):
        names.add(UNPROXIED)
    return frozenset(names | {f"profile.{options.profile or _profile(names)}"})


def _profile(names: set[str]) -> str:
    """CSI 1.13 removed the volume condition, so a driver that advertises it speaks an older version."""
    return "1.12" if names & {"controller.VOLUME_CONDITION", "node.VOLUME_CONDITION"} else "1.13"


def _is_proxied(channels: Channels, timeout_s: float) -> bool:
    """Whether a crust proxy passes the node's calls on: it says so to a caller that asks for versions.

    A refused Probe says nothing of the kind, and has a case of its own.
    """
    asked = ((extensions.KEY, extensions.VERSIONS),)
    try:
        _, call = csi_pb2_grpc.IdentityStub(channels.node).Probe.with_call(
            csi_pb2.ProbeRequest(), timeout=timeout_s, metadata=asked, wait_for_ready=True
        )
    except grpc.RpcError:
        return False
    return any(key == extensions.PROXY_VERSION for key, _ in call.trailing_metadata() or ())


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
    """The answer, unchecked, because cases check it. None if the RPC is not implemented."""
    try:
        return calls.method(request)(
            request, timeout=calls.timeout_s, metadata=_METADATA, wait_for_ready=True
        )
    except grpc.RpcError as error:
        refusal = Refusal(request, error)
    if refusal.code is not Code.UNIMPLEMENTED:
        raise refusal
    return None


def _option_names(options: Options) -> Iterable[str]:
    params = options.parameters
    values = {
        "option.profile": options.profile,
        "option.log": options.log,
        "option.restart-command": options.restart_command,
        "parameters.mutable_parameters": params.mutable_parameters,
        "parameters.ephemeral_context": params.ephemeral_context,
        "parameters.multi_node": params.multi_node,
        "parameters.other_node_id": params.other_node_id,
    }
    yield from (name for name, value in values.items() if value)


def _name(enum: object, number: int) -> str:
    try:
        return str(enum.Name(number))  # type: ignore[attr-defined]
    except ValueError:
        return str(number)


@dataclass(frozen=True, slots=True)
class Inferred:
    """The completed options, all names that the driver has, and remarks for its author."""

    options: Options
    has: frozenset[str]
    remarks: tuple[str, ...] = ()


def inferred(
    channels: Channels, has: frozenset[str], options: Options, needs: Collection[str]
) -> Inferred:
    """Try out the abilities in `needs`, the needs of the chosen cases: a refused CreateVolume means "has not".

    The volumes are deleted at once. An ability that the operator's options decide is not tried.
    """
    params = options.parameters
    if CREATE not in has:
        completed = params.model_copy(update={"fs_types": params.fs_types or (_USUAL,)})
        given_names = {BLOCK} if params.block else set()
        return Inferred(replace(options, parameters=completed), has | given_names)
    trial = _Trial(channels, options)
    fs_types = params.fs_types or (_USUAL if trial.try_create(mount(_USUAL)) else "",)
    if not params.fs_types and not fs_types[0] and not trial.try_create(mount()):
        trial.remarks.append(
            f"the driver makes no plain filesystem volume: {trial.refusal}; the settings file may have to name"
            " the driver's parameters, secrets, size_bytes or fs_types"
        )
    extra = set[str]()
    if params.block or (params.block is None and trial.try_create(block(), params.raw_size_bytes)):
        extra.add(BLOCK)
    if CHECKS_FS_TYPE in needs and not trial.try_create(mount(NO_FILESYSTEM)):
        extra.add(CHECKS_FS_TYPE)
    completed = params.model_copy(update={"fs_types": fs_types})
    return Inferred(replace(options, parameters=completed), has | extra, tuple(trial.remarks))


class _Trial(Calls):
    """Creates volumes, and deletes them again."""

    def __init__(self, channels: Channels, options: Options) -> None:
        super().__init__(channels, options.timeout_s, options.parameters.secrets)
        self._parameters = options.parameters
        self.refusal = ""
        self.remarks: list[str] = []

    def try_create(self, capability: csi_pb2.VolumeCapability, size_bytes: int = 0) -> bool:
        """Create a volume for it, and delete it; whether that was possible: `refusal` is the driver's reason."""
        size = csi_pb2.CapacityRange(required_bytes=size_bytes or self._parameters.size_bytes)
        request = csi_pb2.CreateVolumeRequest(
            name=f"conformance-trial-{tokens.token_hex(6)}",
            volume_capabilities=[capability],
            capacity_range=size,
            parameters=self._parameters.parameters,
        )
        try:
            volume = self.until_final(request).volume
        except AssertionError as refusal:
            self.refusal = str(refusal)
            return False
        self._delete(volume.volume_id)
        return True

    def _delete(self, volume_id: str) -> None:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        try:
            self.until_final(request)
        except Refusal as refusal:
            self.remarks.append(f"a volume of the trial could not be deleted: {refusal}")
