"""A node carries out what it is asked: in order, once, within bounds, for its own pool, and nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from crust.cluster.agent import AT_ONCE, Limits
from crust.cluster.node_calls import CLOCKS_APART_S, NodeCalls
from crust.cluster.protocol import Answer, Request
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.memory_cluster import MemoryController, Store
from tests.support.cluster.simulated_pools import SimulatedPool, joined

CREATE = "/csi.v1.Controller/CreateVolume"
GET = "/csi.v1.Controller/ControllerGetVolume"
LIMITS = Limits(look_every_s=0.02, repeat_every_s=0.05, at_once=2, waiting=4)


class RequestingController:
    """A controller that puts requests to one node."""

    def __init__(self, store: Store, controller: MemoryController, pool: SimulatedPool) -> None:
        self.store = store
        self.pool = pool
        self._controller = controller

    def ask(
        self,
        request_id: str,
        method: str = CREATE,
        message: bytes | None = None,
        deadline_s: float = 0,
        pool_id: str = "",
    ) -> asyncio.Task[Answer]:
        """Put a request; the task has its answer."""
        data = csi_pb2.CreateVolumeRequest(name=request_id).SerializeToString()
        request = Request(
            request_id,
            method,
            data if message is None else message,
            deadline_s,
            pool_id or self.pool.pool_id(),
        )
        return asyncio.create_task(self._controller.ask("n1", request, 20))

    async def code(self, *arguments: Any, **named: Any) -> grpc.StatusCode:
        """The code of the answer."""
        answer = await self.ask(*arguments, **named)
        return next(each for each in grpc.StatusCode if each.value[0] == answer.code)


@pytest.fixture
async def asking() -> AsyncIterator[RequestingController]:
    async with AsyncExitStack() as stack:
        store = Store()
        pool = SimulatedPool("n1", 1)
        await stack.enter_async_context(joined(pool, store.node("n1"), LIMITS))
        controller = store.controller()
        await stack.enter_async_context(controller.lead("c"))
        yield RequestingController(store, controller, pool)


async def test_question_whether_a_volume_stands_waits_for_its_running_creation(
    asking: RequestingController,
) -> None:
    asking.pool.gate.clear()
    creating = asking.ask("pvc")
    await asking.pool.arrived.wait()
    get = csi_pb2.ControllerGetVolumeRequest(volume_id=asking.pool.ids.volume_id("pvc"))
    looking = asking.ask("look", GET, get.SerializeToString())
    await asking.ask("other", "/csi.v1.Controller/GetCapacity", b"")
    assert not looking.done()
    asking.pool.gate.set()
    assert (await creating).code == (await looking).code == 0


async def test_node_announces_what_changed_and_repeats_it(asking: RequestingController) -> None:
    await eventually(lambda: "n1" in asking.store.kept.announcements)
    asking.pool.capacity = 7
    await eventually(lambda: asking.store.kept.announcements["n1"].capacity_bytes == 7)
    asking.store.wipe()
    await eventually(lambda: "n1" in asking.store.kept.announcements)


async def test_node_announces_itself_again_after_the_store_was_away(
    asking: RequestingController,
) -> None:
    await eventually(lambda: "n1" in asking.store.kept.announcements)
    asking.store.cut("n1")
    asking.pool.capacity = 7
    asking.store.heal("n1")
    await eventually(lambda: "n1" in asking.store.kept.announcements)
    assert asking.store.kept.announcements["n1"].capacity_bytes == 7


async def test_requests_of_one_volume_run_one_after_the_other_in_their_order(
    asking: RequestingController,
) -> None:
    asking.pool.gate.clear()
    create = asking.ask("pvc")
    await asking.pool.arrived.wait()
    volume_id = asking.pool.ids.volume_id("pvc")
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume_id).SerializeToString()
    delete = asking.ask("second", "/csi.v1.Controller/DeleteVolume", message)
    other = asking.ask("other")
    await eventually(lambda: asking.pool.calls == ["CreateVolume", "CreateVolume"])
    asking.pool.gate.set()
    assert [each.code for each in await asyncio.gather(create, delete, other)] == [0, 0, 0]
    assert asking.pool.calls == ["CreateVolume", "CreateVolume", "DeleteVolume"]
    assert list(asking.pool.volumes) == [asking.pool.ids.volume_id("other")]


async def test_next_request_begins_when_the_answer_before_is_in_the_store(
    asking: RequestingController,
) -> None:
    asking.pool.gate.clear()
    create = asking.ask("pvc")
    await asking.pool.arrived.wait()
    message = csi_pb2.DeleteVolumeRequest(
        volume_id=asking.pool.ids.volume_id("pvc")
    ).SerializeToString()
    delete = asking.ask("second", "/csi.v1.Controller/DeleteVolume", message)
    asking.store.cut("n1")
    asking.pool.gate.set()
    await eventually(lambda: bool(asking.pool.volumes))
    for _ in range(20):
        await asyncio.sleep(0)
    assert asking.pool.calls == ["CreateVolume"]
    asking.store.heal("n1")
    assert (await create).code == 0
    assert (await delete).code == 0
    assert asking.pool.calls == ["CreateVolume", "DeleteVolume"]


async def test_no_more_run_at_once_than_the_limit(asking: RequestingController) -> None:
    asking.pool.gate.clear()
    tasks = [asking.ask(f"pvc-{number}") for number in range(4)]
    await eventually(lambda: len(asking.pool.calls) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asking.pool.calls) == 2
    asking.pool.gate.set()
    await asyncio.gather(*tasks)
    assert len(asking.pool.calls) == 4
    assert AT_ONCE > 1


async def test_request_beyond_the_queue_is_unavailable(asking: RequestingController) -> None:
    asking.pool.gate.clear()
    tasks = [asking.ask(f"pvc-{number}") for number in range(4)]
    await eventually(lambda: len(asking.pool.calls) == 2)
    assert await asking.code("pvc-5") is grpc.StatusCode.UNAVAILABLE
    asking.pool.gate.set()
    assert {each.code for each in await asyncio.gather(*tasks)} == {0}


async def test_request_that_comes_again_gets_its_answer_without_being_carried_out(
    asking: RequestingController,
) -> None:
    first = await asking.ask("pvc")
    again = await asking.ask("pvc")
    assert again == first
    assert asking.pool.calls == ["CreateVolume"]


async def test_request_redelivered_while_it_runs_is_answered_once(
    asking: RequestingController,
) -> None:
    asking.pool.gate.clear()
    asked = asking.ask("pvc")
    await asking.pool.arrived.wait()
    asking.store.redeliver("n1")
    for _ in range(20):
        await asyncio.sleep(0)
    asking.pool.gate.set()
    assert (await asked).code == 0
    assert asking.pool.calls == ["CreateVolume"]


async def test_request_that_nobody_waits_for_is_not_carried_out(
    asking: RequestingController,
) -> None:
    assert await asking.code("pvc", deadline_s=1.0) is grpc.StatusCode.UNAVAILABLE
    assert asking.pool.calls == []


async def test_request_of_a_controller_whose_clock_is_behind_is_carried_out(
    asking: RequestingController,
) -> None:
    deadline_s = time.time() - CLOCKS_APART_S / 2
    assert await asking.code("pvc", deadline_s=deadline_s) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "method",
    [
        "/csi.v1.Node/NodeUnpublishVolume",
        "/csi.v1.Identity/Probe",
        "/csi.v1.Controller/ControllerGetCapabilities",
        "/crust.v1.Inspect/Bundle",
        "nonsense",
    ],
)
async def test_method_outside_of_the_controllers_services_is_refused(
    asking: RequestingController, method: str
) -> None:
    assert await asking.code("r", method, b"") is grpc.StatusCode.UNIMPLEMENTED
    assert asking.pool.calls == []


async def test_request_for_another_pool_is_not_carried_out(asking: RequestingController) -> None:
    assert await asking.code("pvc", pool_id="ffffffffffffffff") is grpc.StatusCode.UNAVAILABLE
    assert asking.pool.calls == []


async def test_unreadable_message_is_refused_and_ends_nothing(asking: RequestingController) -> None:
    assert await asking.code("r", message=b"\xff\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert await asking.code("pvc") is grpc.StatusCode.OK


async def test_answer_too_large_for_the_store_is_an_error(asking: RequestingController) -> None:
    for number in range(20_000):
        volume_id = asking.pool.ids.volume_id(str(number))
        asking.pool.volumes[volume_id] = csi_pb2.Volume(volume_id=volume_id)
    message = csi_pb2.ListVolumesRequest().SerializeToString()
    code = await asking.code("r", "/csi.v1.Controller/ListVolumes", message)
    assert code is grpc.StatusCode.INTERNAL


async def test_request_that_fails_unexpectedly_is_answered_and_the_next_one_begins(
    asking: RequestingController, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, failures = NodeCalls._called, [ValueError("unexpected")]

    async def failing_once(self: NodeCalls, *given: Any) -> Answer:
        if failures:
            raise failures.pop()
        return await called(self, *given)

    monkeypatch.setattr(NodeCalls, "_called", failing_once)
    message = csi_pb2.CreateVolumeRequest(name="pvc").SerializeToString()
    assert await asking.code("1", message=message) == grpc.StatusCode.INTERNAL
    assert await asking.code("2", message=message) == grpc.StatusCode.OK
