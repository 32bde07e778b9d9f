"""The calls of the suite go to the part of the driver that serves them."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import Calls, Channels, connected


class Recorder(grpc.GenericRpcHandler):
    """Answers everything with an empty message."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        self.methods.append(method.rpartition("/")[2])
        if method.startswith("/csi.v1.SnapshotMetadata/"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter((b"",)))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@contextmanager
def recording(socket: Path) -> Iterator[Recorder]:
    """A server on the socket while the block runs."""
    recorder = Recorder()
    server = grpc.server(futures.ThreadPoolExecutor(1), [recorder])
    server.add_insecure_port(channel.target_of(str(socket)))
    server.start()
    try:
        yield recorder
    finally:
        server.stop(None).wait()


def _call_each(channels: Channels) -> None:
    calls = Calls(channels, 10.0)
    calls.ask(csi_pb2.ProbeRequest())
    calls.ask(csi_pb2.NodeGetInfoRequest())
    calls.ask(csi_pb2.ListVolumesRequest())
    assert len(calls.ask(csi_pb2.GetMetadataAllocatedRequest())) == 1


def test_calls_of_the_node_go_to_the_node_part_alone(tmp_path: Path) -> None:
    with recording(tmp_path / "n.sock") as node, recording(tmp_path / "c.sock") as controller:
        with connected(str(tmp_path / "n.sock"), str(tmp_path / "c.sock")) as channels:
            _call_each(channels)
        assert node.methods == ["NodeGetInfo"]
        assert controller.methods == ["Probe", "ListVolumes", "GetMetadataAllocated"]


def test_one_socket_gets_all_calls(tmp_path: Path) -> None:
    with recording(tmp_path / "n.sock") as node:
        with connected(str(tmp_path / "n.sock")) as channels:
            _call_each(channels)
        assert len(node.methods) == 4
