"""The proxy's Runtime API of a whole node, called as a driver calls it; and the I/O limits that QEMU reports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from crust.core import volumes
from crust.rpc import channel
from crust.rpc.messages import crust_v1
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc
from tests.support.nodes.whole_node import WholeNode


@dataclass
class RuntimeApi:
    """Freeze, thaw and limits, by target path."""

    stub: "runtime_pb2_grpc.RuntimeAsyncStub"

    async def freeze(self, target: Path, thaw_after_s: int) -> bool:
        request = runtime_pb2.RuntimeFreezeVolumeRequest(
            volume_target_path=str(target), thaw_after_seconds=thaw_after_s
        )
        return (await self.stub.RuntimeFreezeVolume(request, timeout=60)).frozen

    async def thaw(self, target: Path) -> bool:
        request = runtime_pb2.RuntimeThawVolumeRequest(volume_target_path=str(target))
        return (await self.stub.RuntimeThawVolume(request, timeout=60)).was_frozen

    async def limit(self, target: Path, limits: volumes.IoLimits) -> bool:
        request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
            volume_target_path=str(target), limits=crust_v1.io_limits_to_wire(limits)
        )
        return (await self.stub.RuntimeSetVolumeLimits(request, timeout=60)).applied


@asynccontextmanager
async def connected(node: WholeNode) -> AsyncIterator[RuntimeApi]:
    async with channel.connect(f"{node.daemons.paths.crust_run}/runtime.sock") as to_proxy:
        yield RuntimeApi(runtime_pb2_grpc.RuntimeStub(to_proxy))


async def limits_in_force(node: WholeNode) -> dict[str, volumes.IoLimits]:
    """The limits that QEMU enforces, by target path."""
    listed = await node.runtime.list()
    return {
        target: volumes.IoLimits(**limits)
        for volume in listed
        for target, limits in volume["limits"].items()
    }
