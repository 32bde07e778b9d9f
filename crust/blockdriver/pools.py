"""The services of a driver that has one or several pools: each request goes to the driver of one pool.

An id names its pool (`pool_access`), and the class of a new volume names it by `crust.dev/pool`. All other code knows
one pool. A driver of one pool takes the same way.

- A request whose ids and class name two pools is refused: no snapshot, clone or group has parts in two pools.
- A pool that is not open refuses its own requests. Which ids a pool has is unknown until it was opened once: until
  then it also refuses the ids that no other pool has, because none of them is known to be absent.
- A list has the pools one after the other, and refuses the page that reaches a pool that is not open: to a CO, a
  volume that is not listed does not exist.
- The driver is ready while one of its pools is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message

from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.controller.list_volumes import PAGE_MAX, Listed
from crust.blockdriver.engines import pool_access
from crust.blockdriver.pool_watch import PoolWatch
from crust.blockdriver.records.node_state import NodeState, Published
from crust.blockdriver.settings import DEFAULT_POOL
from crust.core import errors, supervised
from crust.rpc.call import Call
from crust.rpc.messages import csi
from crust.rpc.serving.service import Methods, methods_of
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import pool_pb2

_PARTS = {
    "Identity": "identity",
    "Controller": "controller",
    "GroupController": "controller",
    "SnapshotMetadata": "controller",
    "Node": "node",
}
"""The part of a `Driver` that has the methods of a service of CSI."""
_LISTS: Mapping[str, Callable[[Any], str]] = {
    "ListVolumes": lambda entry: entry.volume.volume_id,
    "ListSnapshots": lambda entry: entry.snapshot.snapshot_id,
    "ControllerListVolumeHealth": lambda entry: entry.volume_id,
}
"""The id in an entry of each list."""
_IDS = (
    "volume_id",
    "source_volume_id",
    "source_volume_ids",
    "snapshot_id",
    "snapshot_ids",
    "group_snapshot_id",
    "base_snapshot_id",
    "target_snapshot_id",
)
_VOLUMES = 500
"""The volumes of a pool that one look reads."""


class PoolNotOnNode(errors.Exhausted):
    def __init__(self, name: str, present: Mapping[str, object]) -> None:
        super().__init__(
            f"the pool {name[:64]!r} is not on this node",
            why=f"its driver has {', '.join(present)}",
            hint=f"correct {POOL} of the StorageClass, or add the pool to the driver's settings",
        )


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of a driver, by their names, the default one first; the health is that of the process."""

    _watches: Mapping[str, PoolWatch]
    _health: supervised.Health

    def methods(self) -> Iterator[Methods]:
        """The methods of all services: those of this class, and the others at the pool of each request."""
        default = self._watches[DEFAULT_POOL].driver
        lists = dict.fromkeys(_LISTS, self._listed)
        for name, service in csi_pb2.DESCRIPTOR.services_by_name.items():
            served = {
                method.name: getattr(self, method.name, lists.get(method.name, self._routed))
                for method in service.methods
                if hasattr(getattr(default, _PARTS[name]), method.name)
            }
            yield methods_of(SimpleNamespace(**served), service)
        yield methods_of(self, pool_pb2.DESCRIPTOR.services_by_name["Pool"])

    async def Probe(self, request: csi_pb2.ProbeRequest, call: Call) -> csi_pb2.ProbeResponse:
        """Ready while one pool is: sidecars wait for a driver that is not, with all pools."""
        probes = (watch.driver.identity.Probe(request, call) for watch in self._watches.values())
        answers = await asyncio.gather(*probes, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, csi_pb2.ProbeResponse) and answer.ready.value:
                return answer
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, call: Call
    ) -> csi_pb2.GetCapacityResponse:
        """Of the pool that the class names; 0 where this node has not that pool."""
        try:
            answer: csi_pb2.GetCapacityResponse = await self._routed(request, call)
        except PoolNotOnNode:
            return csi_pb2.GetCapacityResponse()
        return answer

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """As the pool's; and a volume is of the class of its own pool alone."""
        named = request.parameters.pop(POOL) if POOL in request.parameters else ""
        answer: csi_pb2.ValidateVolumeCapabilitiesResponse = await self._routed(request, call)
        pool_name = self._of(request).driver.pool_name
        if not (named and answer.HasField("confirmed")):
            return answer
        if named != pool_name:
            message = f"the volume is in the pool {pool_name}"
            return csi_pb2.ValidateVolumeCapabilitiesResponse(message=message)
        answer.confirmed.parameters[POOL] = named
        return answer

    async def NodeGetStorageHealth(
        self, request: csi_pb2.NodeGetStorageHealthRequest, call: Call
    ) -> csi_pb2.NodeGetStorageHealthResponse:
        """CSI 1.13. The problems of every pool; a pool that is not served is one, while another one is."""
        self._of(request).admit(call.method)
        answer = csi_pb2.NodeGetStorageHealthResponse()
        for watch in self._watches.values():
            problem = await self._problem(watch)
            if problem is None:
                answer.MergeFrom(await watch.driver.node.NodeGetStorageHealth(request, call))
                continue
            answer.backend_health.add(
                status=csi_pb2.STORAGE_UNREACHABLE,
                reason=problem.error_name,
                message=csi.shortened(f"{watch.component}: {problem}"),
            )
        return answer

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, call: Call
    ) -> pool_pb2.GetPoolResponse:
        """The space of each pool, and the problems of the process. An only pool that is not open refuses."""
        spaces = []
        problems = dict(self._health.problems)
        found = await asyncio.gather(*map(self._problem, self._watches.values()))
        for (name, watch), problem in zip(self._watches.items(), found, strict=True):
            space = pool_pb2.GetPoolResponse(name=name)
            if problem is None:
                controller = watch.driver.controller
                space.thick = controller.provisioner.thick
                look = controller.stores.capacity.measured
                measured = await controller.calls.read((), look, call)
                for kind, number in measured.items():
                    setattr(space, f"{kind}_bytes", number)
            else:
                problems[watch.component], space.problem = problem, problem.shown()
            spaces.append(space)
        answer, *further = spaces
        answer.further.extend(further)
        for name, problem in problems.items():
            answer.conditions.add(
                component=name, error_name=problem.error_name, message=str(problem)
            )
        return answer

    async def ListPoolVolumes(
        self, request: pool_pb2.ListPoolVolumesRequest, call: Call
    ) -> AsyncIterator[pool_pb2.PoolVolume]:
        """The volumes of each pool that is served, read page by page; an only pool that is not open refuses."""
        for name, watch in self._watches.items():
            if await self._problem(watch) is not None:
                continue
            controller, token, is_last = watch.driver.controller, "", False
            while not is_last:
                look = partial(controller.lister.page, _VOLUMES, token)
                page, token = await controller.calls.read(token, look, call)
                for listed in page:
                    yield _pool_volume(listed, controller.stores.node_state, name)
                is_last = not token

    async def _problem(self, watch: PoolWatch) -> errors.CrustError | None:
        """Why a pool of several is not served; None of an only one, whose calls say it themselves."""
        if len(self._watches) == 1:
            return None
        if watch.problem is not None:
            return watch.problem
        try:
            await watch.driver.identity.check_pool()
        except errors.CrustError as error:
            return error
        return None

    def _routed(self, request: Any, call: Call) -> Any:
        """What the pool of the request answers: an awaitable, or a stream."""
        watch = self._of(request)
        watch.admit(call.method)
        service, rpc = call.method.rsplit("/", 2)[1:]
        part = getattr(watch.driver, _PARTS[service.rpartition(".")[2]])
        return getattr(part, rpc)(request, call)

    async def _listed(self, request: Any, call: Call) -> Any:
        """A page, by pool and id. It ends at the limit, or where a pool has more; the token is the last id on it. The
        snapshots of one volume, or one of them, are listed by their pool alone.
        """
        if any(_pool_ids(request)):
            return await self._routed(request, call)
        after = pool_access.pool_of(request.starting_token)
        request.max_entries = min(request.max_entries or PAGE_MAX, PAGE_MAX)
        watches = list(self._watches.values())
        first = next((n for n, watch in enumerate(watches) if after == watch.pool_id), 0)
        answer, rpc = None, call.method.rpartition("/")[2]
        for watch in watches[first:]:
            watch.admit(call.method)
            page = await getattr(watch.driver.controller, rpc)(request, call)
            if answer is None:
                answer = page
            else:
                answer.MergeFrom(page)
            request.max_entries -= len(page.entries)
            request.starting_token = ""
            if page.next_token:
                break
            if not request.max_entries and watch is not watches[-1]:
                answer.next_token = _LISTS[rpc](page.entries[-1])
                break
        return answer

    def _of(self, request: Any) -> PoolWatch:
        """The pool of a request: of its class, which the request loses here, and of its ids; else the first one that
        is open.

        Raises `PoolNotOnNode`, `SeveralPools`, and the problem of a pool that may have the ids.
        """
        watches, named = self._watches.values(), list[PoolWatch]()
        for pool_id in set(_pool_ids(request)):
            found = [watch for watch in watches if watch.pool_id == pool_id]
            for watch in watches:
                if not found and watch.problem is not None and not watch.pool_id:
                    raise watch.problem  # its id is not known yet
            named += found
        if isinstance(request, csi_pb2.CreateVolumeRequest | csi_pb2.GetCapacityRequest):
            name = request.parameters.pop(POOL) if POOL in request.parameters else DEFAULT_POOL
            if name not in self._watches:
                raise PoolNotOnNode(name, self._watches)
            named.append(self._watches[name])
        if len(pools := {watch.driver.pool_name: watch for watch in named}) > 1:
            raise errors.InvalidRequest.named(
                "SeveralPools",
                "the request is refused",
                why=f"it is of the pools {', '.join(sorted(pools))}, and no data goes from one to another",
                hint=f"name one pool alone; a copy is of the pool of its source ({POOL} of its StorageClass)",
            )
        opened = (watch for watch in watches if watch.problem is None)
        return next(iter(pools.values()), None) or next(opened, self._watches[DEFAULT_POOL])


def _pool_ids(request: Message) -> Iterator[str]:
    fields = request.DESCRIPTOR.fields_by_name
    ids = [getattr(request, name) for name in _IDS if name in fields]
    if isinstance(request, csi_pb2.CreateVolumeRequest):
        source = request.volume_content_source
        ids += [source.snapshot.snapshot_id, source.volume.volume_id]
    for value in ids:
        texts = [value] if isinstance(value, str) else value
        yield from filter(None, map(pool_access.pool_of, texts))


def _pool_volume(listed: Listed, node_state: NodeState, pool_name: str) -> pool_pb2.PoolVolume:
    condition = listed.health.condition
    problems = [condition.message] if condition.abnormal else []
    publishes: tuple[Published, ...] = ()
    try:
        publishes = node_state.of(listed.volume_id).publishes
    except errors.Corrupt as error:
        problems.append(error.shown())
    return pool_pb2.PoolVolume(
        volume_id=listed.volume_id,
        name=listed.record.name if listed.record else "",
        capacity_bytes=listed.record.capacity_bytes if listed.record else 0,
        nodes=listed.nodes,
        targets=[entry.target for entry in publishes],
        problem="; ".join(problems),
        thick=listed.record is not None and listed.record.thick,
        pool=pool_name,
        pods=[entry.pod for entry in publishes],
    )
