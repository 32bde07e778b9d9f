"""crust.v1's Pool, for operators: the pool's space and its volumes.

It changes nothing, and has the rules of the controller part: an absent pool refuses both calls.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from crust.blockdriver.controller.list_volumes import Listed
from crust.blockdriver.services.controller import Controller
from crust.core import errors
from crust.rpc.call import Call
from crust.wire.v1 import pool_pb2

_PAGE = 500
"""The volumes of a pool that one look reads."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The service Pool of the driver of one pool."""

    controller: Controller

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, call: Call
    ) -> pool_pb2.GetPoolResponse:
        """The pool's space now, in bytes; CreateVolume decides by it."""
        measured = await self.controller.calls.read(
            (), self.controller.stores.capacity.measured, call
        )
        answer = pool_pb2.GetPoolResponse(thick=self.controller.provisioner.thick)
        for kind, number in measured.items():
            setattr(answer, f"{kind}_bytes", number)
        return answer

    async def ListPoolVolumes(
        self, request: pool_pb2.ListPoolVolumesRequest, call: Call
    ) -> AsyncIterator[pool_pb2.PoolVolume]:
        """The volumes of ListVolumes, read page by page."""
        token = ""
        while True:
            look = partial(self.controller.lister.page, _PAGE, token)
            page, token = await self.controller.calls.read(token, look, call)
            for listed in page:
                yield self._pool_volume(listed)
            if not token:
                return

    def _pool_volume(self, listed: Listed) -> pool_pb2.PoolVolume:
        condition = listed.health.condition
        problems = [condition.message] if condition.abnormal else []
        targets: list[str] = []
        try:
            published = self.controller.stores.node_state.of(listed.volume_id).publishes
            targets = [entry.target for entry in published]
        except errors.Corrupt as error:
            problems.append(error.shown())
        return pool_pb2.PoolVolume(
            volume_id=listed.volume_id,
            name=listed.record.name if listed.record else "",
            capacity_bytes=listed.record.capacity_bytes if listed.record else 0,
            nodes=listed.nodes,
            targets=targets,
            problem="; ".join(problems),
            thick=listed.record is not None and listed.record.thick,
        )
