"""A driver whose process has its own csi_pb2 in the default pool, run as `python drivers_own_csi.py DIRECTORY ORDER`.

DIRECTORY holds that generated code, of a CSI without crust's fields. ORDER: which of the two is imported first. It
serves a servicer of grpc, calls it as a shim does, and writes the answers as JSON.
"""

import importlib
import json
import sys
from concurrent import futures
from typing import Any

import grpc

DIRECTORY, ORDER = sys.argv[1:3]
sys.path.insert(0, DIRECTORY)
if ORDER == "driver-first":
    own, own_grpc = importlib.import_module("csi_pb2"), importlib.import_module("csi_pb2_grpc")

from crust.core import volumes  # noqa: E402
from crust.csi_shim import library  # noqa: E402
from crust.rpc.messages import extensions  # noqa: E402
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc  # noqa: E402
from tests.support.co import publish_request  # noqa: E402

own, own_grpc = importlib.import_module("csi_pb2"), importlib.import_module("csi_pb2_grpc")

# no block device is needed: the kernel's answers are given
library.identify_device = lambda path: volumes.DeviceIdentity(7, 1, 99)
library.devices.size_bytes = lambda _: 1 << 20  # type: ignore[attr-defined]


class Node(own_grpc.NodeServicer):  # type: ignore[misc, name-defined]
    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        assert type(request) is own.NodePublishVolumeRequest
        if library.is_deferred(request):
            return library.deferred_mount("/dev/loop1", "ext4", request)
        return own.NodePublishVolumeResponse()

    def NodeGetCapabilities(self, request: Any, context: Any) -> Any:
        mine = own.NodeGetCapabilitiesResponse()
        mine.capabilities.add().rpc.type = own.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME
        return library.capabilities(context, mine, group=True)


def answers(channel: grpc.Channel) -> dict[str, Any]:
    """The driver's answers to a caller that knows deferral, and to one that does not."""
    node: Any = csi_pb2_grpc.NodeStub(channel)
    knows = {"metadata": extensions.METADATA, "timeout": 20}
    deferred = node.NodePublishVolume(publish_request("v", "/t"), **knows)
    plain = node.NodePublishVolume(publish_request("v", "/t", defer=False), timeout=20)
    told = node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), **knows)
    untold = node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=20)
    return {
        "device": deferred.deferred_mount.block_device.path,
        "identity": deferred.deferred_mount.block_device.identity.disk_sequence,
        "plain": plain.HasField("deferred_mount"),
        "told": [capability.rpc.type for capability in told.capabilities],
        "untold": [capability.rpc.type for capability in untold.capabilities],
    }


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    own_grpc.add_NodeServicer_to_server(Node(), server)
    socket = f"unix:{DIRECTORY}/{ORDER}.sock"
    server.add_insecure_port(socket)
    server.start()
    with grpc.insecure_channel(socket) as channel:
        sys.stdout.write(json.dumps(answers(channel)))
    server.stop(None).wait()


if __name__ == "__main__":
    main()
