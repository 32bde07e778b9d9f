"""Which capabilities of the Controller service a driver advertises, by its CSI profile and role."""

from crust.blockdriver.services.node_identity import NodeIdentity
from crust.wire.csi.v1 import csi_pb2

_Rpc = csi_pb2.ControllerServiceCapability.RPC
_CAPABILITIES = (
    _Rpc.CREATE_DELETE_VOLUME,
    _Rpc.PUBLISH_UNPUBLISH_VOLUME,
    _Rpc.PUBLISH_READONLY,
    _Rpc.LIST_VOLUMES,
    _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
    _Rpc.GET_VOLUME,
    _Rpc.GET_CAPACITY,
    _Rpc.EXPAND_VOLUME,
    _Rpc.MODIFY_VOLUME,
    _Rpc.CREATE_DELETE_SNAPSHOT,
    _Rpc.LIST_SNAPSHOTS,
    _Rpc.GET_SNAPSHOT,
    _Rpc.CLONE_VOLUME,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
)
_NOT_IN_SHARED_POOL = frozenset(
    {
        _Rpc.PUBLISH_UNPUBLISH_VOLUME,
        _Rpc.PUBLISH_READONLY,
        _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
        _Rpc.GET_NODE_INFO,
    }
)
_NOT_IN_NODE_DEPLOYMENT = _NOT_IN_SHARED_POOL | {_Rpc.EXPAND_VOLUME, _Rpc.MODIFY_VOLUME}
_HEALTH = {
    "1.12": (_Rpc.VOLUME_CONDITION,),
    "1.13": (_Rpc.GET_VOLUME_HEALTH, _Rpc.LIST_VOLUME_HEALTH),
}


def advertised(identity: NodeIdentity, *, with_node_info: bool) -> list[_Rpc.Type.ValueType]:
    """The capabilities of the driver's CSI profile; `with_node_info`: the caller knows crust's extension."""
    types = [*_CAPABILITIES, *_HEALTH[identity.csi_profile]]
    if with_node_info:
        types.append(_Rpc.GET_NODE_INFO)
    if identity.role.node_deployment:
        types = [each for each in types if each not in _NOT_IN_NODE_DEPLOYMENT]
    if identity.role.is_shared:
        types = [each for each in types if each not in _NOT_IN_SHARED_POOL]
    return types
