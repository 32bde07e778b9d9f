"""A vendor's controller, and the shim before it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from crust.csi_shim import shim_process
from crust.csi_shim.settings import ShimSettings
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support import trees
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver

Code = grpc.StatusCode
KNOWN = {"type", "blocksize", "bytesPerInode", "fromBackup"}


class Controller(FakeDriver):
    """A vendor's controller: it remembers each request, and refuses parameters that it does not know."""

    def __init__(self) -> None:
        super().__init__("1.13", twist=self._answered)
        self.name = "csi.example.com"
        self.requests: list[Any] = []
        self.context: dict[str, str] = {}
        self.source = False

    def _answered(self, method: str, request: Any, answer: Any) -> Any:
        """Of any volume; what the fake driver itself answers is of volumes that it has made."""
        if method.startswith("Get") and method != "GetCapacity":
            return answer
        self.requests.append(request)
        unknown = set(getattr(request, "parameters", ())) - KNOWN
        if unknown and method in ("CreateVolume", "GetCapacity"):
            return Failure(Code.INVALID_ARGUMENT, f"Invalid parameter key {unknown}")
        return getattr(self, f"_{method}", lambda _: getattr(csi_pb2, f"{method}Response")())(
            request
        )

    def _CreateVolume(self, _: Any) -> Any:
        volume = csi_pb2.Volume(
            volume_id="vol-1", capacity_bytes=1 << 30, volume_context=self.context
        )
        if self.source:
            volume.content_source.volume.volume_id = "vol-0"
        return csi_pb2.CreateVolumeResponse(volume=volume)

    def _ValidateVolumeCapabilities(self, request: Any) -> Any:
        answer = csi_pb2.ValidateVolumeCapabilitiesResponse()
        answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
        answer.confirmed.volume_context.update(request.volume_context)
        return answer

    def _GetCapacity(self, _: Any) -> Any:
        return csi_pb2.GetCapacityResponse(available_capacity=7 << 30)

    @property
    def last(self) -> Any:
        return self.requests[-1]


@dataclass
class Served:
    """The controller, and a sidecar's stub of the shim before it."""

    driver: Controller
    stub: Any


async def serve(**access: Any) -> AsyncIterator[Served]:
    driver = Controller()
    with trees.temporary("crust-") as root:
        settings = ShimSettings(
            socket=f"{root}/csi.sock",
            driver_socket=f"{root}/driver.sock",
            controller=True,
            **{"check_detach": False, **access},
        )
        async with (
            fake_driver.serving(driver, settings.driver_socket),
            shim_process.serving(settings),
            channel.connect(settings.socket) as connected,
        ):
            yield Served(driver, csi_pb2_grpc.ControllerStub(connected))
