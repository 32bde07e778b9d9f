"""The server of each driver: a thread pool, a log of requests, and switches for bad behaviour.

The log (`calls.jsonl`) has every request as it came. The switches (`switches.json`) name a fault for each method of
the driver: a test writes the file while the driver runs. To hang, a call opens two FIFOs, which the test made:
`hanging` to say so, and `release`, which opens once the test does.
"""

import argparse
import base64
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from crust.wire.csi.v1 import csi_pb2
from examples.drivers.disks import CommandFailed

Code = grpc.StatusCode


class Refused(Exception):
    """A call ends with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Switches:
    """Bad behaviour, by method."""

    def __init__(self, state_dir: str) -> None:
        self._dir = state_dir
        self._lock = threading.Lock()

    def of(self, method: str) -> str:
        """The fault to show; empty if none."""
        try:
            with open(f"{self._dir}/switches.json", encoding="utf-8") as file:
                return str(json.load(file).get(method, ""))
        except FileNotFoundError:
            return ""

    def note(self, method: str, request: bytes) -> None:
        """Write the request to the log."""
        line = {"method": method, "request": base64.b64encode(request).decode()}
        with self._lock, open(f"{self._dir}/calls.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def before(self, method: str, volume_id: str) -> None:
        """Die, hang or fail before anything is done."""
        wanted = self.of(method)
        if wanted == "die before":
            die()
        if wanted in ("hang", f"hang on {volume_id}"):
            with open(f"{self._dir}/hanging", "wb") as told:
                told.write(b".")
            os.close(os.open(f"{self._dir}/release", os.O_RDONLY))
        if wanted.startswith("fail "):
            _, name, text = wanted.split(" ", 2)
            raise Refused(getattr(Code, name), text)

    def after(self, method: str) -> None:
        """Die, or fail, with the work done."""
        wanted = self.of(method)
        if wanted == "die after":
            die()
        if wanted.startswith("fail-after "):
            _, name, text = wanted.split(" ", 2)
            raise Refused(getattr(Code, name), text)


def die() -> NoReturn:
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(9)


_SERVICE = csi_pb2.PluginCapability.Service
_CONTROLLER = csi_pb2.ControllerServiceCapability.RPC.Type
_NODE = csi_pb2.NodeServiceCapability.RPC.Type


@dataclass(frozen=True)
class Plugin:
    """A driver's name and capabilities; the capabilities are names of CSI's enumerations."""

    name: str
    version: str
    node_id: str
    controller: tuple[str, ...]
    node: tuple[str, ...] = ()
    max_volumes: int = 0

    def GetPluginInfo(self, _: object) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name=self.name, vendor_version=self.version)

    def GetPluginCapabilities(self, _: object) -> csi_pb2.GetPluginCapabilitiesResponse:
        answer = csi_pb2.GetPluginCapabilitiesResponse()
        answer.capabilities.add().service.type = _SERVICE.CONTROLLER_SERVICE
        if "EXPAND_VOLUME" in self.controller:
            online = csi_pb2.PluginCapability.VolumeExpansion.ONLINE
            answer.capabilities.add().volume_expansion.type = online
        return answer

    def Probe(self, _: object) -> csi_pb2.ProbeResponse:
        return csi_pb2.ProbeResponse()

    def ControllerGetCapabilities(self, _: object) -> csi_pb2.ControllerGetCapabilitiesResponse:
        answer = csi_pb2.ControllerGetCapabilitiesResponse()
        for capability in self.controller:
            answer.capabilities.add().rpc.type = _CONTROLLER.Value(capability)
        return answer

    def NodeGetInfo(self, _: object) -> csi_pb2.NodeGetInfoResponse:
        return csi_pb2.NodeGetInfoResponse(
            node_id=self.node_id, max_volumes_per_node=self.max_volumes
        )

    def NodeGetCapabilities(self, _: object) -> csi_pb2.NodeGetCapabilitiesResponse:
        answer = csi_pb2.NodeGetCapabilitiesResponse()
        for capability in self.node:
            answer.capabilities.add().rpc.type = _NODE.Value(capability)
        return answer


def handlers(servicers: tuple[Any, ...], switches: Switches) -> list[grpc.GenericRpcHandler]:
    """gRPC's handlers of the methods that the servicers of a driver have."""
    served: list[grpc.GenericRpcHandler] = []
    for service in csi_pb2.DESCRIPTOR.services_by_name.values():
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method.name: grpc.unary_unary_rpc_method_handler(
                _behaviour(
                    method.name, method.input_type.name, getattr(servicer, method.name), switches
                ),
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for method in service.methods
            for servicer in servicers
            if hasattr(servicer, method.name)
        }
        if methods:
            served.append(grpc.method_handlers_generic_handler(service.full_name, methods))
    return served


def _behaviour(
    method: str, kind: str, answer: Callable[[Any], Any], switches: Switches
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    def behave(data: bytes, context: grpc.ServicerContext) -> Any:
        switches.note(method, data)
        try:
            request = getattr(csi_pb2, kind).FromString(data)
            switches.before(method, getattr(request, "volume_id", ""))
            answered = answer(request)
            switches.after(method)
        except Refused as refused:
            context.abort(refused.code, str(refused))
        except (CommandFailed, OSError) as error:
            context.abort(Code.INTERNAL, str(error))
        else:
            return answered

    return behave


@dataclass(frozen=True)
class Arguments:
    """The command line of a driver's process."""

    socket: str
    state_dir: str
    node_id: str

    @classmethod
    def parse(cls) -> "Arguments":
        """From the command line."""
        parser = argparse.ArgumentParser()
        for option in ("--socket", "--state-dir", "--node-id"):
            parser.add_argument(option, required=True)
        given = parser.parse_args()
        return cls(given.socket, given.state_dir, given.node_id)


def serve(socket: str, switches: Switches, *servicers: Any) -> None:
    """Serve until the process is ended."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    server.add_generic_rpc_handlers(handlers(servicers, switches))
    if os.path.exists(socket):
        os.unlink(socket)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    server.wait_for_termination()


class State:
    """A dictionary in a JSON file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.lock = threading.RLock()
        try:
            with open(path, encoding="utf-8") as file:
                self.volumes: dict[str, dict[str, Any]] = json.load(file)
        except FileNotFoundError:
            self.volumes = {}

    def save(self) -> None:
        """Write it."""
        with open(f"{self._path}.new", "w", encoding="utf-8") as file:
            json.dump(self.volumes, file)
        os.rename(f"{self._path}.new", self._path)

    def get(self, volume_id: str) -> dict[str, Any]:
        """A volume, or NOT_FOUND."""
        if not volume_id:
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID not provided")
        if volume_id not in self.volumes:
            raise Refused(Code.NOT_FOUND, f"Volume {volume_id} not found")
        return self.volumes[volume_id]
