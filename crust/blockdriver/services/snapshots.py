"""The snapshot calls of CSI's Controller, GroupController and SnapshotMetadata: decode, call, encode.

A snapshot or group is an operation of its own id, which holds its volumes as well: no call publishes, expands or
deletes a volume while it is copied, and a call during the copy gets ABORTED (CSI).

The allocated blocks of a snapshot, or the changed blocks of two, are read in parts, since a tenant decides how many
there are: each part in one thread hop, from the byte on at which the part before it ended. That is one list, because
snapshots cannot change. What lies between the blocks of the list is zeros (allocated) or equal (delta); a listed
block may be either. An engine that cannot compute the list refuses (`NoChangeTracking`).
"""

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from crust.blockdriver.controller import list_volumes, topology
from crust.blockdriver.host.extents import Extent
from crust.blockdriver.records.models import Snapshot, SnapshotSet
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.services.calls import Calls
from crust.blockdriver.services.roles import Role
from crust.blockdriver.snapshots import snapshot_sets
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
from crust.core import deferral_keys, errors, volumes
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2

_NS = 1_000_000_000
M = TypeVar("M", csi_pb2.GetMetadataAllocatedResponse, csi_pb2.GetMetadataDeltaResponse)
PIECE_MAX = 4096
"""The most blocks in one message, also without a limit in the request."""
PART = PIECE_MAX
"""About how many blocks of a list are in memory for each call, and are read in one turn: some 10 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotCalls:
    """The services GroupController and SnapshotMetadata, and the Controller's snapshot calls."""

    role: Role
    stores: Stores
    snapshots: SnapshotSets
    calls: Calls

    async def CreateSnapshot(
        self, request: csi_pb2.CreateSnapshotRequest, call: Call
    ) -> csi_pb2.CreateSnapshotResponse:
        """Idempotent by name."""
        volume_id = volumes.VolumeId(csi.required(request.source_volume_id, "source_volume_id"))
        name = csi.required(request.name, "name")
        check_parameters(csi.mapping(request.parameters, "parameters"))
        if not is_met(request.accessibility_requirements, self.stores.segment):
            raise topology.TopologyNotAccessible(self.stores.segment, "snapshot")
        snapshot_id = self.stores.pool.ids.snapshot_id(name)
        created = await self.calls.change(
            snapshot_id,
            volume_id,
            lambda: self.snapshots.create(name, volume_id),
            call,
            also=[volume_id],
        )
        return csi_pb2.CreateSnapshotResponse(snapshot=self._to_wire(created, created.snapshots[0]))

    async def DeleteSnapshot(
        self, request: csi_pb2.DeleteSnapshotRequest, call: Call
    ) -> csi_pb2.DeleteSnapshotResponse:
        """Idempotent: absent is a success."""
        snapshot_id = csi.required(request.snapshot_id, "snapshot_id")
        await self.calls.change(
            snapshot_id, None, lambda: workers.run(self.snapshots.delete, snapshot_id), call
        )
        return csi_pb2.DeleteSnapshotResponse()

    async def GetSnapshot(
        self, request: csi_pb2.GetSnapshotRequest, call: Call
    ) -> csi_pb2.GetSnapshotResponse:
        snapshot_id = csi.required(request.snapshot_id, "snapshot_id")
        return csi_pb2.GetSnapshotResponse(
            snapshot=self._to_wire(*await self._snapshot(snapshot_id, call))
        )

    async def _snapshot(self, snapshot_id: str, call: Call) -> tuple[SnapshotSet, Snapshot]:
        return await self.calls.read(snapshot_id, lambda: self.snapshots.find(snapshot_id), call)

    async def ListSnapshots(
        self, request: csi_pb2.ListSnapshotsRequest, call: Call
    ) -> csi_pb2.ListSnapshotsResponse:
        """Ordered by set and id; an empty list if no snapshot matches. The token is the last id of a page.

        The list omits a snapshot with an unreadable record: the pool's health reports it, and a request by its id
        gets RecordUnreadable.
        """
        source, snapshot_id = request.source_volume_id, request.snapshot_id
        for value, field in ((source, "source_volume_id"), (snapshot_id, "snapshot_id")):
            if value:
                csi.required(value, field)
        token = request.starting_token
        csi.check_page(request.max_entries, token, self.stores.pool.ids.is_snapshot_id)
        page, next_token = await self.calls.read(
            (source, snapshot_id, token, request.max_entries),
            lambda: self._page(source, snapshot_id, token, request.max_entries),
            call,
        )
        entries = [
            csi_pb2.ListSnapshotsResponse.Entry(snapshot=self._to_wire(*entry)) for entry in page
        ]
        return csi_pb2.ListSnapshotsResponse(entries=entries, next_token=next_token)

    def _page(
        self, source: str, snapshot_id: str, token: str, count: int
    ) -> tuple[tuple[tuple[SnapshotSet, Snapshot], ...], str]:
        if not snapshot_id:
            entries = self.snapshots.page(source, token)
            return list_volumes.cut(entries, count, lambda entry: entry[1].snapshot_id)
        try:
            snapshot_set, snapshot = self.snapshots.find(snapshot_id)
        except errors.NotFound:
            return (), ""
        is_wanted = source in ("", snapshot.source_volume_id) and snapshot_id != token
        return ((snapshot_set, snapshot),) if is_wanted else (), ""

    def _to_wire(self, snapshot_set: SnapshotSet, snapshot: Snapshot) -> csi_pb2.Snapshot:
        """A snapshot of a set; in CSI 1.13 with its topology."""
        is_single = snapshot_set.set_id == snapshot.snapshot_id
        pb = csi_pb2.Snapshot(
            size_bytes=snapshot.size_bytes,
            snapshot_id=snapshot.snapshot_id,
            source_volume_id=snapshot.source_volume_id,
            ready_to_use=True,
            group_snapshot_id="" if is_single else snapshot_set.set_id,
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(snapshot_set.created_ns, _NS)
        if self.role.csi_profile == "1.13":
            pb.accessible_topology.extend(self.calls.places)
        return pb

    def _group_to_wire(self, group: SnapshotSet) -> csi_pb2.VolumeGroupSnapshot:
        pb = csi_pb2.VolumeGroupSnapshot(
            group_snapshot_id=group.set_id,
            snapshots=[self._to_wire(group, snapshot) for snapshot in group.snapshots],
            ready_to_use=True,
        )
        pb.creation_time.seconds, pb.creation_time.nanos = divmod(group.created_ns, _NS)
        return pb

    async def GroupControllerGetCapabilities(
        self, request: csi_pb2.GroupControllerGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.GroupControllerGetCapabilitiesResponse:
        rpc = csi_pb2.GroupControllerServiceCapability.RPC
        capability = csi_pb2.GroupControllerServiceCapability(
            rpc=rpc(type=rpc.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)
        )
        return csi_pb2.GroupControllerGetCapabilitiesResponse(capabilities=[capability])

    async def CreateVolumeGroupSnapshot(
        self, request: csi_pb2.CreateVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.CreateVolumeGroupSnapshotResponse:
        """Idempotent by name; a point-in-time copy of all volumes."""
        name = csi.required(request.name, "name")
        # in a fixed order, so that requests can be compared
        ids = sorted(
            volumes.VolumeId(csi.required(volume_id, f"source_volume_ids[{number}]"))
            for number, volume_id in enumerate(request.source_volume_ids)
        )
        if not ids:
            raise csi.MissingField("source_volume_ids")
        if len(set(ids)) != len(ids):
            raise errors.InvalidRequest.named(
                "SameVolumeTwice", "source_volume_ids are invalid", why="one id occurs twice"
            )
        check_parameters(csi.mapping(request.parameters, "parameters"))
        group = await self.calls.change(
            self.stores.pool.ids.group_id(name),
            ids,
            lambda: self.snapshots.create_group(name, ids),
            call,
            also=ids,
        )
        return csi_pb2.CreateVolumeGroupSnapshotResponse(group_snapshot=self._group_to_wire(group))

    async def DeleteVolumeGroupSnapshot(
        self, request: csi_pb2.DeleteVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.DeleteVolumeGroupSnapshotResponse:
        """Idempotent: absent is a success."""
        group_id = csi.required(request.group_snapshot_id, "group_snapshot_id")
        named = _snapshot_ids(request.snapshot_ids)
        group = await self.calls.read(
            (group_id, named), lambda: self.snapshots.find_group(group_id, named), call
        )
        await self.calls.change(
            group_id,
            named,
            lambda: workers.run(self.snapshots.delete_group, group_id, named),
            call,
            also=[snapshot.snapshot_id for snapshot in group.snapshots] if group else [],
        )
        return csi_pb2.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: csi_pb2.GetVolumeGroupSnapshotRequest, call: Call
    ) -> csi_pb2.GetVolumeGroupSnapshotResponse:
        group_id = csi.required(request.group_snapshot_id, "group_snapshot_id")
        named = _snapshot_ids(request.snapshot_ids)
        group = await self.calls.read(
            (group_id, named), lambda: self.snapshots.get_group(group_id, named), call
        )
        return csi_pb2.GetVolumeGroupSnapshotResponse(group_snapshot=self._group_to_wire(group))

    async def GetMetadataAllocated(
        self, request: csi_pb2.GetMetadataAllocatedRequest, call: Call
    ) -> AsyncIterator[csi_pb2.GetMetadataAllocatedResponse]:
        """The blocks that may hold data."""
        snapshot_id = csi.required(request.snapshot_id, "snapshot_id")
        _check_count(request.max_results)
        _, snapshot = await self._snapshot(snapshot_id, call)
        read = partial(self.stores.provisioning.allocated, snapshot_sets.image_of(snapshot))
        kind = csi_pb2.GetMetadataAllocatedResponse
        async for message in self._messages(kind, (snapshot,), read, request, call):
            yield message

    async def GetMetadataDelta(
        self, request: csi_pb2.GetMetadataDeltaRequest, call: Call
    ) -> AsyncIterator[csi_pb2.GetMetadataDeltaResponse]:
        """The blocks of the target that may differ from the base."""
        base_id = csi.required(request.base_snapshot_id, "base_snapshot_id")
        target_id = csi.required(request.target_snapshot_id, "target_snapshot_id")
        _check_count(request.max_results)
        _, base = await self._snapshot(base_id, call)
        _, target = await self._snapshot(target_id, call)
        if base.source_volume_id != target.source_volume_id:
            raise errors.InvalidRequest.named(
                "UnrelatedSnapshots",
                f"{base.snapshot_id} and {target.snapshot_id} cannot be compared",
                why="they are of different volumes",
            )
        images = snapshot_sets.image_of(base), snapshot_sets.image_of(target)
        read = partial(self.stores.provisioning.changed, *images)
        kind = csi_pb2.GetMetadataDeltaResponse
        async for message in self._messages(kind, (base, target), read, request, call):
            yield message

    async def _messages(
        self,
        kind: type[M],
        snapshots: Sequence[Snapshot],
        read: Callable[[int], Iterable[Extent]],
        request: csi_pb2.GetMetadataAllocatedRequest | csi_pb2.GetMetadataDeltaRequest,
        call: Call,
    ) -> AsyncIterator[M]:
        """The block list of these snapshots, which `read` gives from a byte on, up to the end of the last of them."""
        start, end = request.starting_offset, snapshots[-1].size_bytes
        # The end itself is valid: a caller that has read all blocks continues there.
        if not 0 <= start <= end:
            raise errors.OutOfRange.named(
                "OffsetPastEnd",
                "starting_offset is invalid",
                why=f"{start} is not within the snapshot's {end} bytes",
            )
        snapshot_ids = tuple(snapshot.snapshot_id for snapshot in snapshots)
        in_message = min(request.max_results or PIECE_MAX, PIECE_MAX)
        in_part = max(PART // in_message, 1) * in_message  # whole messages

        def read_part() -> Sequence[M]:
            # A thread makes the messages: the event loop has the calls of all tenants.
            for snapshot_id in snapshot_ids:
                self.snapshots.find(snapshot_id)  # deleted since the part before?
            bounds = ((max(one.offset, start), min(one.end, end)) for one in read(start))
            part = itertools.islice((pair for pair in bounds if pair[0] < pair[1]), in_part)
            messages: list[M] = []
            while regions := tuple(itertools.islice(part, in_message)):
                message = kind(
                    block_metadata_type=csi_pb2.VARIABLE_LENGTH, volume_capacity_bytes=end
                )
                for first, last in regions:
                    message.block_metadata.add(byte_offset=first, size_bytes=last - first)
                messages.append(message)
            return messages

        is_complete = False
        while not is_complete:
            question = (snapshot_ids, start, in_message)
            with contextlib.ExitStack() as operations:
                for snapshot_id in snapshot_ids:  # no call deletes one during the read
                    operations.enter_context(
                        self.calls.running.shared(snapshot_id, "a read of its block list")
                    )
                async with workers.turn():
                    messages = await self.calls.read(question, read_part, call)
            for message in messages:
                yield message
                last = message.block_metadata[-1]
                start = last.byte_offset + last.size_bytes
            is_complete = sum(len(one.block_metadata) for one in messages) < in_part


def is_met(pb: csi_pb2.TopologyRequirement, segment: str) -> bool:
    """Whether this node meets accessibility_requirements; raises `topology.InvalidTopology`."""
    requisite = [csi.mapping(place.segments, "segments") for place in pb.requisite]
    preferred = [csi.mapping(place.segments, "segments") for place in pb.preferred]
    return topology.is_met(requisite, preferred, segment)


def check_parameters(sent: Iterable[str]) -> None:
    """Raise `UnknownSnapshotParameter` for any key that is not a sidecar's."""
    for key in sent:
        if not key.startswith(deferral_keys.KUBERNETES):
            raise errors.InvalidRequest.named(
                "UnknownSnapshotParameter",
                f"the parameter {key[:128]!r} is not known",
                why="this driver knows no parameters of snapshots",
            )


def _snapshot_ids(sent: Iterable[str]) -> tuple[str, ...]:
    """The ids, perhaps none: external-snapshotter names no members of a group that it does not know."""
    ids = (csi.required(one, f"snapshot_ids[{n}]") for n, one in enumerate(sent))
    return tuple(sorted(ids))


def _check_count(count: int) -> None:
    if count < 0:
        raise errors.InvalidRequest.named(
            "NegativeMaxResults", "max_results is invalid", why=f"{count} is negative"
        )
