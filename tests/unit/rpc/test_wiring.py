"""Parts that reach each other by a path: without a socket where they are wired, by one where they are not."""

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust import errors, logs
from crust.rpc import channel, passthrough
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.serving.daemon import Daemon
from crust.rpc.status import PeerStatus
from crust.rpc.wiring import Wiring
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.reported import reported

REQUEST = csi_pb2.NodeGetVolumeStatsRequest(volume_id="vol")


class Node(csi_pb2_grpc.NodeServicer):
    """Refuses every volume."""

    async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        raise errors.NotFound(f"no volume {request.volume_id}")


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        yield name


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


def add(to: Any) -> None:
    node = Node()  # type: ignore[abstract]
    csi_pb2_grpc.add_NodeServicer_to_server(node, to)


async def code_at(port: Port) -> grpc.StatusCode:
    with pytest.raises(PeerStatus) as caught:
        await stub(csi_pb2_grpc.NodeStub, port).NodeGetVolumeStats(REQUEST, timeout=20)
    return caught.value.code


async def test_inner_path_is_unavailable_until_its_part_serves_and_after_it(
    root: str, stack: AsyncExitStack
) -> None:
    path = f"{root}/driver.sock"
    wires = Wiring(inner=[path])
    to = await stack.enter_async_context(wires.connect(path))
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE
    async with wires.serving(path, add, name="driver", daemon=Daemon()):
        assert await code_at(to) is grpc.StatusCode.NOT_FOUND
        assert not Path(path).exists()
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE


async def test_shared_path_is_served_on_its_socket_too(root: str, stack: AsyncExitStack) -> None:
    path = f"{root}/runtime.sock"
    wires = Wiring(shared=[path])
    inside = await stack.enter_async_context(wires.connect(path))
    outside = await stack.enter_async_context(SocketPort(path))
    async with wires.serving(path, add, name="runtime", daemon=Daemon()):
        assert await code_at(inside) is grpc.StatusCode.NOT_FOUND
        assert await code_at(outside) is grpc.StatusCode.NOT_FOUND


async def test_path_that_is_not_wired_is_a_socket(root: str, stack: AsyncExitStack) -> None:
    path = f"{root}/other.sock"
    wires = Wiring(inner=[f"{root}/driver.sock"])
    to = await stack.enter_async_context(wires.connect(path))
    async with wires.serving(path, add, name="other", daemon=Daemon()):
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
        async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
            ids.append(request_id())
            return csi_pb2.NodeGetVolumeStatsResponse()

    shim, driver, front = (f"{root}/{name}.sock" for name in ("shim", "driver", "csi"))
    wires, daemon = Wiring(inner=[shim, driver]), Daemon()
    node = Recording()  # type: ignore[abstract]
    enter = stack.enter_async_context
    await enter(
        wires.serving(
            driver,
            lambda to: csi_pb2_grpc.add_NodeServicer_to_server(node, to),
            name="driver",
            daemon=daemon,
        )
    )
    for path, behind in ((shim, driver), (front, shim)):
        generic = passthrough.Passthrough(await enter(wires.connect(behind)))
        await enter(wires.serving(path, name=path, daemon=daemon, generic=[generic]))
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
