"""What a driver advertises, as one set of names: `controller.LIST_VOLUMES`, `node.EXPAND_VOLUME`, `plugin.ONLINE`.

A case lists the names that it needs. An option that the operator gives has a name too (`option.log`), and so has
what is tried out because no capability says it (`driver.block`: crust/conformance/inferred.py).
"""

from collections.abc import Iterable

import grpc

from crust.conformance import case
from crust.conformance.options import Options
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_METADATA = ((extensions.KEY, f"{extensions.DEFERRAL},{extensions.NODE_INFO}"),)
_Service = csi_pb2.PluginCapability.Service.Type
_Expansion = csi_pb2.PluginCapability.VolumeExpansion.Type
_Controller = csi_pb2.ControllerServiceCapability.RPC.Type
_Node = csi_pb2.NodeServiceCapability.RPC.Type
_Group = csi_pb2.GroupControllerServiceCapability.RPC.Type


def of(channel: grpc.Channel, options: Options) -> frozenset[str]:
    """Ask the driver. Raises grpc.RpcError where it does not answer at all."""
    found = {
        *_plugin(channel, options.timeout_s),
        *_controller(channel, options.timeout_s),
        *_node(channel, options.timeout_s),
        *_group(channel, options.timeout_s),
        *_given(options),
    }
    return frozenset(found | {f"profile.{options.profile or _profile(found)}"})


def _profile(found: set[str]) -> str:
    """CSI 1.13 removed the volume condition, so a driver that advertises it speaks an older version."""
    return "1.12" if found & {"controller.VOLUME_CONDITION", "node.VOLUME_CONDITION"} else "1.13"


def _plugin(channel: grpc.Channel, timeout_s: float) -> Iterable[str]:
    stub = csi_pb2_grpc.IdentityStub(channel)
    answer = stub.GetPluginCapabilities(
        csi_pb2.GetPluginCapabilitiesRequest(), timeout=timeout_s, wait_for_ready=True
    )
    for each in answer.capabilities:
        if each.HasField("service"):
            yield f"plugin.{_name(_Service, each.service.type)}"
        elif each.HasField("volume_expansion"):
            yield f"plugin.{_name(_Expansion, each.volume_expansion.type)}"


def _controller(channel: grpc.Channel, timeout_s: float) -> Iterable[str]:
    stub = csi_pb2_grpc.ControllerStub(channel)
    request = csi_pb2.ControllerGetCapabilitiesRequest()
    try:
        answer = stub.ControllerGetCapabilities(request, timeout=timeout_s, metadata=_METADATA)
    except grpc.RpcError as error:
        _must_be_absent(error)
        return
    yield "controller"
    for each in answer.capabilities:
        yield f"controller.{_name(_Controller, each.rpc.type)}"


def _node(channel: grpc.Channel, timeout_s: float) -> Iterable[str]:
    stub = csi_pb2_grpc.NodeStub(channel)
    request = csi_pb2.NodeGetCapabilitiesRequest()
    try:
        answer = stub.NodeGetCapabilities(request, timeout=timeout_s, metadata=_METADATA)
    except grpc.RpcError as error:
        _must_be_absent(error)
        return
    yield "node"
    for each in answer.capabilities:
        yield f"node.{_name(_Node, each.rpc.type)}"
    try:
        info = stub.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        _must_be_absent(error)
        return
    yield case.NODE_INFO
    if 0 < info.max_volumes_per_node <= case.FEW_VOLUMES_MAX:
        yield case.FEW_VOLUMES


def _group(channel: grpc.Channel, timeout_s: float) -> Iterable[str]:
    stub = csi_pb2_grpc.GroupControllerStub(channel)
    request = csi_pb2.GroupControllerGetCapabilitiesRequest()
    try:
        answer = stub.GroupControllerGetCapabilities(request, timeout=timeout_s)
    except grpc.RpcError as error:
        _must_be_absent(error)
        return
    for each in answer.capabilities:
        yield f"group.{_name(_Group, each.rpc.type)}"


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


def _must_be_absent(error: grpc.RpcError) -> None:
    assert isinstance(error, grpc.Call)
    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
        raise error
