"""CreateVolume in a cluster: place, record, send; and what an answer means for the record.

    the record is new, and the node is gone before anything     nothing stands: the record goes, the next node is
    was sent                                                    tried
    the node has no capacity, or is in the wrong topology       the same; at the end RESOURCE_EXHAUSTED
    any other final answer that leaves nothing                  the record goes, the answer is passed on
    no answer, or one that is not final                         the record stays: perhaps the volume stands; the
                                                                same name goes to the same node
    the recorded node is not connected, or no node at all is    UNAVAILABLE, until it is or until it is retired

RESOURCE_EXHAUSTED makes external-provisioner have the pod scheduled again; UNAVAILABLE makes it repeat the same name
until there is a final answer, even after the claim was deleted.
"""

from collections.abc import Collection

from crust import errors, pool_ids
from crust.cluster.central import placement, routing
from crust.cluster.central.names import Names
from crust.cluster.central.routing import Router
from crust.cluster.protocol import Announcement, NodeAbsent
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

ATTEMPTS = 3
"""How many nodes are tried in one call."""


class VolumePlacement:
    """Creates volumes. The caller makes one call per name at a time."""

    def __init__(self, router: Router, names: Names) -> None:
        self._router = router
        self._names = names

    async def create(self, request: csi_pb2.CreateVolumeRequest) -> csi_pb2.CreateVolumeResponse:
        """Create the volume in a pool; a retry goes to the same one.

        Raises `placement.NoNodeForVolume`, `placement.NoNodeConnected`, `routing.NotInThisCluster`,
        `names.PoolNotSurveyed`, as `Router.call`.
        """
        key = pool_ids.name_key("volume", limits.required(request.name, "name"))
        tried: dict[str, errors.CrustError] = {}
        while True:
            pool_id, is_new = await self._place(key, request, tried)
            is_sent = False
            try:
                self._router.find(pool_id)
                is_sent = True
                response: csi_pb2.CreateVolumeResponse = await self._router.call(
                    pool_id, "CreateVolume", request
                )
            except errors.CrustError as error:
                if not _nothing_stands(error, is_new=is_new, is_sent=is_sent):
                    raise
                await self._names.forget(key, pool_id)
                tried[pool_id] = error
                if not _may_fit_elsewhere(error, request) or len(tried) == ATTEMPTS:
                    raise
            else:
                return response

    async def _place(
        self,
        key: str,
        request: csi_pb2.CreateVolumeRequest,
        tried: dict[str, errors.CrustError],
    ) -> tuple[str, bool]:
        """The pool for the name, and whether no attempt went there before."""
        known = await self._names.pool_of(key)
        if not known:
            choice = self._choose(key, request, tried)
            return await self._names.record(key, choice), True
        await self._names.record(key, known)
        return known, False

    def _choose(
        self,
        key: str,
        request: csi_pb2.CreateVolumeRequest,
        tried: dict[str, errors.CrustError],
    ) -> str:
        source = _source_id(request)
        if source:
            return self._pool_of_source(source)
        topologies = request.accessibility_requirements
        wanted = placement.Wanted(
            key,
            [dict(each.segments) for each in topologies.requisite],
            [dict(each.segments) for each in topologies.preferred],
            request.capacity_range.required_bytes,
        )
        try:
            freed = self._router.freed_lately()
            return placement.choose(wanted, self._untried(tried), freed)[0].pool_id
        except (placement.NoNodeForVolume, placement.NoNodeConnected):
            if tried:
                raise next(reversed(tried.values())) from None
            raise

    def _untried(self, tried: Collection[str]) -> list[Announcement]:
        return [each for each in self._router.connected() if each.pool_id not in tried]

    def _pool_of_source(self, source_id: str) -> str:
        """A copy is made where its source is; that node says whether its topology will do."""
        pool_id = routing.pool_of(source_id)
        self._router.find(pool_id)
        return pool_id


def _nothing_stands(error: errors.CrustError, *, is_new: bool, is_sent: bool) -> bool:
    if isinstance(error, (errors.Exhausted, errors.NotFound)):
        return True  # the node's driver answers so only where it keeps nothing
    # these it answers before it looks at what it keeps: the volume of an earlier attempt may stand
    is_early = isinstance(error, (errors.InvalidRequest, errors.Unsupported, errors.OutOfRange))
    return is_new and (not is_sent or is_early)


def _may_fit_elsewhere(error: errors.CrustError, request: csi_pb2.CreateVolumeRequest) -> bool:
    return not _source_id(request) and isinstance(error, (errors.Exhausted, NodeAbsent))


def _source_id(request: csi_pb2.CreateVolumeRequest) -> str:
    source = request.volume_content_source
    kind = source.WhichOneof("type")
    if kind is None:
        return ""
    found = source.snapshot.snapshot_id if kind == "snapshot" else source.volume.volume_id
    return limits.required(found, f"{kind}_id")
