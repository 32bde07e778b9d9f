"""Parts reach each other by a path: without a socket where both are in the process, by one elsewhere."""

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, logs
from crust.rpc import channel
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.ports import Ports
from crust.rpc.serving.service import Service, methods_of
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.reported import reported

REQUEST = csi_pb2.NodeGetVolumeStatsRequest(volume_id="vol")


class Node:
    """Refuses every volume."""

    async def NodeGetVolumeStats(self, request: Any, call: Any) -> Any:
        raise errors.NotFound(f"no volume {request.volume_id}")


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        yield name


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


def service_of(node: Node, name: str = "driver") -> Service:
    return Service(name, methods_of(node, csi_pb2.DESCRIPTOR.services_by_name["Node"]))


async def code_at(port: Port) -> grpc.StatusCode:
    with pytest.raises(PeerStatus) as caught:
        await stub(csi_pb2_grpc.NodeStub, port).NodeGetVolumeStats(REQUEST, timeout=20)
    return caught.value.code


async def test_inner_path_is_unavailable_until_its_part_serves_and_after_it(
    root: str, stack: AsyncExitStack
) -> None:
    path = f"{root}/driver.sock"
    ports = Ports(inner=[path])
    to = await stack.enter_async_context(ports.connect(path))
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE
    async with ports.serving(path, service_of(Node())):
        assert await code_at(to) is grpc.StatusCode.NOT_FOUND
        assert not Path(path).exists()
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE


async def test_shared_path_is_served_on_its_socket_too(root: str, stack: AsyncExitStack) -> None:
    path = f"{root}/runtime.sock"
    ports = Ports(shared=[path])
    inside = await stack.enter_async_context(ports.connect(path))
    outside = await stack.enter_async_context(SocketPort(path))
    async with ports.serving(path, service_of(Node())):
        assert await code_at(inside) is grpc.StatusCode.NOT_FOUND
        assert await code_at(outside) is grpc.StatusCode.NOT_FOUND


async def test_any_other_path_is_a_socket(root: str, stack: AsyncExitStack) -> None:
    path = f"{root}/other.sock"
    ports = Ports(inner=[f"{root}/driver.sock"])
    to = await stack.enter_async_context(ports.connect(path))
    async with ports.serving(path, service_of(Node())):
        assert Path(path).is_socket()
        assert await code_at(to) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_call_through_three_parts_has_one_line_and_one_id(
    root: str, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "crust.rpc.serving.call_record")
    ids: list[str] = []

    def note(_: logging.LogRecord) -> bool:
        ids.append(request_id())
        return True

    logger = logging.getLogger("crust.rpc.serving.call_record")
    logger.addFilter(note)
    stack.callback(logger.removeFilter, note)

    class Recording(Node):
        async def NodeGetVolumeStats(self, request: Any, call: Any) -> Any:
            ids.append(request_id())
            return csi_pb2.NodeGetVolumeStatsResponse()

    shim, driver, front = (f"{root}/{name}.sock" for name in ("shim", "driver", "csi"))
    ports = Ports(inner=[shim, driver])
    enter = stack.enter_async_context
    await enter(ports.serving(driver, service_of(Recording())))
    for path, behind in ((shim, driver), (front, shim)):
        others = await enter(ports.connect(behind))
        await enter(ports.serving(path, Service(path, others=others)))
    to = await enter(channel.connect(front))
    await csi_pb2_grpc.NodeStub(to).NodeGetVolumeStats(REQUEST, timeout=20)
    await reported()
    served = [each for each in caplog.records if each.message == "served"]
    assert [each.levelno for each in served].count(logging.INFO) == 1
    assert len(served) == (1 if level == logging.INFO else 3)
    assert len(ids) == len(served) + 1
    assert len(set(ids)) == 1
    assert ids[0]


def request_id() -> str:
    return (logs.context.get() or {}).get("request_id", "")
