"""A driver whose process has its own csi_pb2 in the default pool, run as `python drivers_own_csi.py DIRECTORY ORDER`.

DIRECTORY holds that generated code, of a CSI without crust's fields. ORDER: which of the two is imported first. It
serves a servicer of grpc.aio and one of grpc, both wrapped, calls them, and writes the answers as JSON.
"""

import asyncio
import importlib
import json
import logging
import sys
from concurrent import futures
from typing import Any

import grpc
import grpc.aio

DIRECTORY, ORDER = sys.argv[1:3]
sys.path.insert(0, DIRECTORY)
if ORDER == "driver-first":
    own, own_grpc = importlib.import_module("csi_pb2"), importlib.import_module("csi_pb2_grpc")

from crust import volumes  # noqa: E402
from crust.csi_shim import library  # noqa: E402
from crust.rpc.messages import extensions  # noqa: E402
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc  # noqa: E402
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2  # noqa: E402
from tests.support.nodes.node import publish_request  # noqa: E402

own, own_grpc = importlib.import_module("csi_pb2"), importlib.import_module("csi_pb2_grpc")

# no block device is needed: the kernel's answers are given
library.identify_device = lambda path: volumes.DeviceIdentity(7, 1, 99)
library.devices.size_bytes = lambda _: 1 << 20  # type: ignore[attr-defined]


class DriverBug(Exception):
    """Of the driver's author."""


def publish(request: Any) -> Any:
    assert type(request) is own.NodePublishVolumeRequest
    if request.volume_id == "driver-bug":
        raise DriverBug("the password is 1234")
    if library.is_deferred(request):
        return library.deferred_mount("/dev/loop1", "ext4", request)
    return own.NodePublishVolumeResponse()


def capabilities(context: Any) -> Any:
    mine = own.NodeGetCapabilitiesResponse()
    mine.capabilities.add().rpc.type = own.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME
    return library.capabilities(context, mine, group=True)


class AsyncNode(own_grpc.NodeServicer):  # type: ignore[misc, name-defined]
    async def NodePublishVolume(self, request: Any, context: Any) -> Any:
        if request.volume_id == "absent":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such volume")
        return publish(request)

    async def NodeGetCapabilities(self, request: Any, context: Any) -> Any:
        return capabilities(context)


class BlockingNode(own_grpc.NodeServicer):  # type: ignore[misc, name-defined]
    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        if request.volume_id == "absent":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such volume")
        return publish(request)

    def NodeGetCapabilities(self, request: Any, context: Any) -> Any:
        return capabilities(context)


class Proxy(runtime_pb2_grpc.RuntimeServicer):  # its other calls are not made
    async def RuntimeGetVolumeStats(self, request: Any, context: Any) -> Any:
        usage = types_pb2.VolumeUsage(unit=types_pb2.VolumeUsage.BYTES, total=9, used=3)
        return runtime_pb2.RuntimeGetVolumeStatsResponse(usage=[usage])


async def answers(socket: str) -> dict[str, Any]:
    """What a caller of crust's kind gets on `socket`."""
    async with library.connect(socket) as channel:
        node: Any = csi_pb2_grpc.NodeStub(channel)

        async def refused(volume_id: str) -> list[str]:
            request = publish_request(volume_id, "/t")
            try:
                await node.NodePublishVolume(request, metadata=extensions.METADATA, timeout=20)
            except grpc.aio.AioRpcError as error:
                return [error.code().name, error.details() or ""]
            return []

        published = await node.NodePublishVolume(
            publish_request("v", "/t"), metadata=extensions.METADATA, timeout=20
        )
        plain = await node.NodePublishVolume(publish_request("v", "/t", defer=False), timeout=20)
        told = await node.NodeGetCapabilities(
            csi_pb2.NodeGetCapabilitiesRequest(), metadata=extensions.METADATA, timeout=20
        )
        untold = await node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=20)
        stats = await node.NodeGetVolumeStats(
            csi_pb2.NodeGetVolumeStatsRequest(
                volume_id="v", volume_path="/var/lib/t", defer_fs_ops=True
            ),
            timeout=20,
        )
        return {
            "device": published.deferred_mount.block_device.path,
            "identity": published.deferred_mount.block_device.identity.disk_sequence,
            "plain": plain.HasField("deferred_mount"),
            "told": [each.rpc.type for each in told.capabilities],
            "untold": [each.rpc.type for each in untold.capabilities],
            "total": stats.usage[0].total,
            "absent": await refused("absent"),
            "driver-bug": await refused("driver-bug"),
        }


async def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    proxy = grpc.aio.server()
    runtime_pb2_grpc.add_RuntimeServicer_to_server(Proxy(), proxy)  # type: ignore[abstract]
    proxy.add_insecure_port(f"unix:{DIRECTORY}/runtime.sock")
    await proxy.start()
    async with library.connect(f"{DIRECTORY}/runtime.sock") as channel:
        server = grpc.aio.server()
        wrapped = library.wrap(AsyncNode(), library.RuntimeClient(channel))
        own_grpc.add_NodeServicer_to_server(wrapped, server)
        server.add_insecure_port(f"unix:{DIRECTORY}/async.sock")
        await server.start()
        found = {"async": await answers(f"{DIRECTORY}/async.sock")}
        await server.stop(None)
    connected = library.connect_blocking(f"{DIRECTORY}/runtime.sock")
    runtime = await asyncio.to_thread(connected.__enter__)
    threads = grpc.server(futures.ThreadPoolExecutor(2))
    own_grpc.add_NodeServicer_to_server(library.wrap(BlockingNode(), runtime), threads)
    threads.add_insecure_port(f"unix:{DIRECTORY}/blocking.sock")
    threads.start()
    found["blocking"] = await answers(f"{DIRECTORY}/blocking.sock")
    await asyncio.to_thread(threads.stop(None).wait)
    await asyncio.to_thread(connected.__exit__, None, None, None)
    await proxy.stop(None)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
