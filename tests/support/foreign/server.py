"""What both drivers are served with: a thread pool, a log of requests, and switches for bad behaviour.

The log (`calls.jsonl`) has every request as it came. The switches (`switches.json`) say, by method, what the driver
does wrong there: a test writes the file while the driver runs.
"""

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, NoReturn

import grpc

from crust.wire.csi.v1 import csi_pb2
from tests.support.foreign.disks import CommandFailed

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
        """What to do wrong; empty if nothing."""
        try:
            with open(f"{self._dir}/switches.json", encoding="utf-8") as file:
                return str(json.load(file).get(method, ""))
        except FileNotFoundError:
            return ""

    def note(self, method: str, request: bytes) -> None:
        """Write down what arrived."""
        line = {"method": method, "request": base64.b64encode(request).decode()}
        with self._lock, open(f"{self._dir}/calls.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def before(self, method: str) -> None:
        """Die, hang or fail before anything is done."""
        wanted = self.of(method)
        if wanted == "die before":
            die()
        if wanted == "hang":
            Path(self._dir, "hanging").touch()
            while not Path(self._dir, "release").exists():
                time.sleep(0.01)
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


def handlers(servicer: Any, switches: Switches) -> list[grpc.GenericRpcHandler]:
    """gRPC's handlers of the methods that a driver has."""
    found: list[grpc.GenericRpcHandler] = []
    for service in csi_pb2.DESCRIPTOR.services_by_name.values():
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            each.name: grpc.unary_unary_rpc_method_handler(
                _behaviour(each.name, each.input_type.name, getattr(servicer, each.name), switches),
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for each in service.methods
            if hasattr(servicer, each.name)
        }
        if methods:
            found.append(grpc.method_handlers_generic_handler(service.full_name, methods))
    return found


def _behaviour(
    method: str, kind: str, answer: Callable[[Any], Any], switches: Switches
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    def behave(data: bytes, context: grpc.ServicerContext) -> Any:
        switches.note(method, data)
        try:
            switches.before(method)
            answered = answer(getattr(csi_pb2, kind).FromString(data))
            switches.after(method)
        except Refused as refused:
            context.abort(refused.code, str(refused))
        except (CommandFailed, OSError) as error:
            context.abort(Code.INTERNAL, str(error))
        else:
            return answered

    return behave


def serve(servicer: Any, socket: str, switches: Switches) -> None:
    """Serve until the process is ended."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    server.add_generic_rpc_handlers(handlers(servicer, switches))
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
