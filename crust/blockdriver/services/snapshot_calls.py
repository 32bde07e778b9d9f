"""The snapshot calls of CSI's Controller: decode, call, encode.

A snapshot is an operation of its own name, which holds its volumes as well: no call publishes, expands or deletes a
volume while it is copied, and a call during the copy gets ABORTED (CSI).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from crust.blockdriver.controller import list_volumes, topology
from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.services import deadlines, messages
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.roles import NodeIdentity
from crust.blockdriver.snapshots.group_snapshot import GroupSnapshots
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots
from crust.core import errors, operations, volumes
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

_SIDECARS = "csi.storage.k8s.io/"
_NS = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotCalls:
    """The Controller's snapshot calls. `identity` is that of driver and node."""

    identity: NodeIdentity
    volume_snapshots: VolumeSnapshots
    group_snapshots: GroupSnapshots
    running: operations.KeyedOperations
    reads: Reads

    async def create(
        self, request: csi_pb2.CreateSnapshotRequest, call: Call
    ) -> csi_pb2.CreateSnapshotResponse:
        """Idempotent by name."""
        volume_id = volumes.VolumeId(limits.required(request.source_volume_id, "source_volume_id"))
        name = limits.required(request.name, "name")
        check_parameters(limits.mapping(request.parameters, "parameters"))
        wanted = messages.requirement(request.accessibility_requirements)
        if not topology.is_met(wanted, self.identity.segment):
            raise topology.TopologyNotAccessible(self.identity.segment, "snapshot")
        snapshot_id = self.volume_snapshots.pool.ids.snapshot_id(name)

        record = await deadlines.change(
            self.running,
            self.key(snapshot_id),
            "CreateSnapshot",
            volume_id,
            lambda: self.volume_snapshots.create(name, volume_id),
            call,
            also=[self.key(volume_id)],
        )
        return csi_pb2.CreateSnapshotResponse(snapshot=self.to_wire(record))

    async def delete(
        self, request: csi_pb2.DeleteSnapshotRequest, call: Call
    ) -> csi_pb2.DeleteSnapshotResponse:
        """Idempotent: absent is a success."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")

        async def work() -> None:
            await workers.run(self.volume_snapshots.delete, snapshot_id)

        await deadlines.change(
            self.running, self.key(snapshot_id), "DeleteSnapshot", None, work, call
        )
        return csi_pb2.DeleteSnapshotResponse()

    async def get(
        self, request: csi_pb2.GetSnapshotRequest, call: Call
    ) -> csi_pb2.GetSnapshotResponse:
        """A snapshot that is ready."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")
        return csi_pb2.GetSnapshotResponse(
            snapshot=self.to_wire(await self.found(snapshot_id, call))
        )

    async def found(self, snapshot_id: str, call: Call) -> SnapshotRecord:
        """A snapshot that is ready; raises `SnapshotNotFound`."""
        return await self.reads.read(
            "GetSnapshot", snapshot_id, lambda: self.volume_snapshots.find(snapshot_id), call
        )

    async def list(
        self, request: csi_pb2.ListSnapshotsRequest, call: Call
    ) -> csi_pb2.ListSnapshotsResponse:
        """Ordered by id; an empty list if no snapshot matches. The token is the last id of a page.

        A snapshot whose record cannot be read is not listed, because nothing is known about it: the pool's health
        reports it, and a request by its id gets `RecordUnreadable`.
        """
        source = limits.optional(request.source_volume_id, "source_volume_id")
        snapshot_id = limits.optional(request.snapshot_id, "snapshot_id")
        if request.max_entries < 0:
            raise limits.NegativeMaxEntries(request.max_entries)
        token = request.starting_token
        if token and not self.volume_snapshots.pool.ids.is_snapshot_id(token):
            raise limits.InvalidStartingToken(token)
        page, next_token = await self.reads.read(
            "ListSnapshots",
            (source, snapshot_id, token, request.max_entries),
            lambda: self._page(source, snapshot_id, token, request.max_entries),
            call,
        )
        entries = [
            csi_pb2.ListSnapshotsResponse.Entry(snapshot=self.to_wire(each)) for each in page
        ]
        return csi_pb2.ListSnapshotsResponse(entries=entries, next_token=next_token)

    def _page(
        self, source: str, snapshot_id: str, token: str, count: int
    ) -> tuple[tuple[SnapshotRecord, ...], str]:
        records = self.volume_snapshots.snapshot_records
        if not snapshot_id:
            found = records.ready(source, token)
            return list_volumes.cut(found, count, lambda each: each.snapshot_id)
        record = records.find(snapshot_id)
        is_wanted = record is not None and record.phase == "ready" and snapshot_id > token
        if record is None or not is_wanted or source not in ("", record.source_volume_id):
            return (), ""
        return (record,), ""

    def to_wire(self, record: SnapshotRecord) -> csi_pb2.Snapshot:
        """A snapshot that is ready; in CSI 1.13 with its topology."""
        pb = csi_pb2.Snapshot(
            size_bytes=record.size_bytes,
            snapshot_id=record.snapshot_id,
            source_volume_id=record.source_volume_id,
            ready_to_use=True,
            group_snapshot_id=record.group_id,
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(record.created_ns, _NS)
        if self.identity.csi_profile == "1.13":
            pb.accessible_topology.extend(messages.places(self.identity.segment))
        return pb

    def group_to_wire(
        self, record: GroupRecord, members: Sequence[SnapshotRecord]
    ) -> csi_pb2.VolumeGroupSnapshot:
        """A group that is ready."""
        pb = csi_pb2.VolumeGroupSnapshot(
            group_snapshot_id=record.group_id,
            snapshots=[self.to_wire(each) for each in members],
            ready_to_use=True,
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(record.created_ns, _NS)
        return pb

    def key(self, thing_id: str) -> volumes.VolumeKey:
        """The key of a volume, snapshot or group: their ids differ in their prefix."""
        return volumes.VolumeKey(self.identity.driver, volumes.VolumeId(thing_id))


def check_parameters(sent: Iterable[str]) -> None:
    """Raise `UnknownSnapshotParameter` for any key that is not a sidecar's."""
    for key in sent:
        if not key.startswith(_SIDECARS):
            raise errors.InvalidRequest.named(
                "UnknownSnapshotParameter",
                f"the parameter {key[:128]!r} is not known",
                why="this driver knows no parameters of snapshots",
                hint="correct the VolumeSnapshotClass",
            )
