"""The snapshot calls of CSI's Controller: decode, call, encode.

A snapshot is an operation of its own name, which holds its volumes as well: no call publishes, expands or deletes a
volume while it is copied, and a call during the copy gets ABORTED (CSI).
"""

import dataclasses
from collections.abc import Iterable

from crust.blockdriver.controller import list_volumes, topology
from crust.blockdriver.records.models import Snapshot, SnapshotSet
from crust.blockdriver.services import deadlines, messages
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.roles import NodeIdentity
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
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
    snapshot_sets: SnapshotSets
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
        snapshot_id = self.snapshot_sets.pool.ids.snapshot_id(name)

        taken = await deadlines.change(
            self.running,
            self.key(snapshot_id),
            "CreateSnapshot",
            volume_id,
            lambda: self.snapshot_sets.create(name, volume_id),
            call,
            also=[self.key(volume_id)],
        )
        return csi_pb2.CreateSnapshotResponse(snapshot=self.to_wire(taken, taken.snapshots[0]))

    async def delete(
        self, request: csi_pb2.DeleteSnapshotRequest, call: Call
    ) -> csi_pb2.DeleteSnapshotResponse:
        """Idempotent: absent is a success."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")

        async def work() -> None:
            await workers.run(self.snapshot_sets.delete, snapshot_id)

        await deadlines.change(
            self.running, self.key(snapshot_id), "DeleteSnapshot", None, work, call
        )
        return csi_pb2.DeleteSnapshotResponse()

    async def get(
        self, request: csi_pb2.GetSnapshotRequest, call: Call
    ) -> csi_pb2.GetSnapshotResponse:
        """A snapshot that exists."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")
        return csi_pb2.GetSnapshotResponse(
            snapshot=self.to_wire(*await self.found(snapshot_id, call))
        )

    async def found(self, snapshot_id: str, call: Call) -> tuple[SnapshotSet, Snapshot]:
        """A snapshot and its set; raises SnapshotNotFound."""
        return await self.reads.read(
            "GetSnapshot", snapshot_id, lambda: self.snapshot_sets.find(snapshot_id), call
        )

    async def list(
        self, request: csi_pb2.ListSnapshotsRequest, call: Call
    ) -> csi_pb2.ListSnapshotsResponse:
        """Ordered by set and id; an empty list if no snapshot matches. The token is the last id of a page.

        A snapshot whose record cannot be read is not listed, because nothing is known about it: the pool's health
        reports it, and a request by its id gets `RecordUnreadable`.
        """
        source = limits.optional(request.source_volume_id, "source_volume_id")
        snapshot_id = limits.optional(request.snapshot_id, "snapshot_id")
        if request.max_entries < 0:
            raise limits.NegativeMaxEntries(request.max_entries)
        token = request.starting_token
        if token and not self.snapshot_sets.pool.ids.is_snapshot_id(token):
            raise limits.InvalidStartingToken(token)
        page, next_token = await self.reads.read(
            "ListSnapshots",
            (source, snapshot_id, token, request.max_entries),
            lambda: self._page(source, snapshot_id, token, request.max_entries),
            call,
        )
        entries = [
            csi_pb2.ListSnapshotsResponse.Entry(snapshot=self.to_wire(*each)) for each in page
        ]
        return csi_pb2.ListSnapshotsResponse(entries=entries, next_token=next_token)

    def _page(
        self, source: str, snapshot_id: str, token: str, count: int
    ) -> tuple[tuple[tuple[SnapshotSet, Snapshot], ...], str]:
        if not snapshot_id:
            found = self.snapshot_sets.page(source, token)
            return list_volumes.cut(found, count, lambda each: each[1].snapshot_id)
        try:
            kept, snapshot = self.snapshot_sets.find(snapshot_id)
        except errors.NotFound:
            return (), ""
        is_wanted = source in ("", snapshot.source_volume_id) and snapshot_id != token
        return ((kept, snapshot),) if is_wanted else (), ""

    def to_wire(self, kept: SnapshotSet, snapshot: Snapshot) -> csi_pb2.Snapshot:
        """A snapshot of a set; in CSI 1.13 with its topology."""
        pb = csi_pb2.Snapshot(
            size_bytes=snapshot.size_bytes,
            snapshot_id=snapshot.snapshot_id,
            source_volume_id=snapshot.source_volume_id,
            ready_to_use=True,
            group_snapshot_id=kept.set_id if kept.set_id != snapshot.snapshot_id else "",
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(kept.created_ns, _NS)
        if self.identity.csi_profile == "1.13":
            pb.accessible_topology.extend(messages.places(self.identity.segment))
        return pb

    def group_to_wire(self, group: SnapshotSet) -> csi_pb2.VolumeGroupSnapshot:
        """A group with its snapshots."""
        pb = csi_pb2.VolumeGroupSnapshot(
            group_snapshot_id=group.set_id,
            snapshots=[self.to_wire(group, each) for each in group.snapshots],
            ready_to_use=True,
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(group.created_ns, _NS)
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
