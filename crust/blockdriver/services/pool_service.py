"""crust.v1's Pool: the space of the pool and its volumes, for operators. Read-only, and of the controller part.

The service adds no knowledge: the space is the capacity that CreateVolume decides by, the volumes are those of
ListVolumes.
"""

import functools
from collections.abc import AsyncIterator

from crust.blockdriver.controller.capacity import PoolCapacity
from crust.blockdriver.controller.list_volumes import Listed, VolumeLister
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.services.deadlines import Calls
from crust.core import errors, volumes
from crust.rpc.call import Call
from crust.wire.v1 import pool_pb2

_PAGE = 500


class PoolService:
    """The Pool service."""

    def __init__(
        self, capacity: PoolCapacity, lister: VolumeLister, node_state: NodeState, calls: Calls
    ) -> None:
        self._capacity = capacity
        self._lister = lister
        self._node_state = node_state
        self._calls = calls

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, call: Call
    ) -> pool_pb2.GetPoolResponse:
        """The pool's space now, in bytes."""
        measured = await self._calls.read("GetPool", (), self._capacity.measured, call)
        return pool_pb2.GetPoolResponse(
            **{f"{kind}_bytes": number for kind, number in measured.items()}
        )

    async def ListPoolVolumes(
        self, request: pool_pb2.ListPoolVolumesRequest, call: Call
    ) -> AsyncIterator[pool_pb2.PoolVolume]:
        """Every volume, read page by page."""
        token = ""
        while True:
            look = functools.partial(self._lister.page, _PAGE, token)
            page, token = await self._calls.read("ListPoolVolumes", token, look, call)
            for listed in page:
                yield self._volume(listed)
            if not token:
                return

    def _volume(self, listed: Listed) -> pool_pb2.PoolVolume:
        volume, condition = listed.volume, listed.health.condition
        problems = [condition.message] if condition.abnormal else []
        targets: list[str] = []
        try:
            published = self._node_state.published_of(volumes.VolumeId(volume.volume_id))
            targets = [entry.target for entry in published]
        except errors.Corrupt as error:
            problems.append(error.shown())
        return pool_pb2.PoolVolume(
            volume_id=volume.volume_id,
            name=listed.name,
            capacity_bytes=volume.capacity_bytes,
            nodes=listed.nodes,
            targets=targets,
            problem="; ".join(problems),
        )
