"""CSI GroupController: decode, call, encode.

A group snapshot is an operation under its own id, which also locks all its volumes.
"""

from collections.abc import Iterable

from crust.blockdriver.services import deadlines, snapshot_calls
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.core import errors, volumes
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2


class GroupController:
    """The GroupController service."""

    def __init__(self, calls: SnapshotCalls) -> None:
        self._calls = calls

    async def GroupControllerGetCapabilities(
        self, request: csi_pb2.GroupControllerGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.GroupControllerGetCapabilitiesResponse:
        """All of the service's capabilities."""
        rpc = csi_pb2.GroupControllerServiceCapability.RPC
        one = csi_pb2.GroupControllerServiceCapability(
            rpc=rpc(type=rpc.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)
        )
        return csi_pb2.GroupControllerGetCapabilitiesResponse(capabilities=[one])

    async def CreateVolumeGroupSnapshot(
        self, request: csi_pb2.CreateVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.CreateVolumeGroupSnapshotResponse:
        """Idempotent by name; a point-in-time copy of all volumes."""
        name = limits.required(request.name, "name")
        ids = _volume_ids(request.source_volume_ids)
        snapshot_calls.check_parameters(limits.mapping(request.parameters, "parameters"))
        calls, sets = self._calls, self._calls.snapshot_sets
        found = await deadlines.change(
            calls.running,
            calls.key(sets.pool.ids.group_id(name)),
            "CreateVolumeGroupSnapshot",
            ids,
            lambda: sets.create_group(name, ids),
            call,
            also=[calls.key(each) for each in ids],
        )
        return csi_pb2.CreateVolumeGroupSnapshotResponse(group_snapshot=calls.group_to_wire(found))

    async def DeleteVolumeGroupSnapshot(
        self, request: csi_pb2.DeleteVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.DeleteVolumeGroupSnapshotResponse:
        """Idempotent: absent is a success."""
        group_id = limits.required(request.group_snapshot_id, "group_snapshot_id")
        named = _snapshot_ids(request.snapshot_ids)
        calls, sets = self._calls, self._calls.snapshot_sets
        group = await calls.reads.read(
            "members of a group", group_id, lambda: sets.find_group(group_id), call
        )
        await deadlines.change(
            calls.running,
            calls.key(group_id),
            "DeleteVolumeGroupSnapshot",
            named,
            lambda: workers.run(sets.delete_group, group_id, named),
            call,
            also=[calls.key(each.snapshot_id) for each in group.snapshots] if group else [],
        )
        return csi_pb2.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: csi_pb2.GetVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.GetVolumeGroupSnapshotResponse:
        """A group that exists."""
        group_id = limits.required(request.group_snapshot_id, "group_snapshot_id")
        named = _snapshot_ids(request.snapshot_ids)
        found = await self._calls.reads.read(
            "GetVolumeGroupSnapshot",
            (group_id, named),
            lambda: self._calls.snapshot_sets.get_group(group_id, named),
            call,
        )
        return csi_pb2.GetVolumeGroupSnapshotResponse(
            group_snapshot=self._calls.group_to_wire(found)
        )


def _volume_ids(sent: Iterable[str]) -> tuple[volumes.VolumeId, ...]:
    """The ids in a fixed order, so that requests can be compared."""
    ids = tuple(
        volumes.VolumeId(limits.required(each, f"source_volume_ids[{n}]"))
        for n, each in enumerate(sent)
    )
    if not ids:
        raise limits.MissingField("source_volume_ids")
    if len(set(ids)) != len(ids):
        raise errors.InvalidRequest.named(
            "SameVolumeTwice", "source_volume_ids are invalid", why="one id occurs twice"
        )
    return tuple(sorted(ids))


def _snapshot_ids(sent: Iterable[str]) -> tuple[str, ...]:
    """None is possible: external-snapshotter names no members of a group that it does not know."""
    return tuple(sorted(limits.required(each, f"snapshot_ids[{n}]") for n, each in enumerate(sent)))
