"""Registration, and the calls that the proxy makes."""

from collections.abc import Awaitable
from typing import Any

from crust import volumes
from crust.rpc.status import PeerStatus
from crust.runtime_handler.conformance.case import case, expect
from crust.runtime_handler.conformance.subject import MIB, SIZE, Subject
from crust.wire.v1 import handlers_pb2, types_pb2

Feature = volumes.HandlerFeature
CALL_S = 60.0


async def _code(s: Subject, call: Awaitable[Any]) -> str:
    try:
        await call
    except PeerStatus as status:
        s.transcript.append(f"<- {status.code.name}: {status.text}")
        return status.code.name
    s.transcript.append("<- OK")
    return "OK"


def _stats(s: Subject, target: str) -> Any:
    s.transcript.append(f"-> GetVolumeStats {target}")
    request = handlers_pb2.GetVolumeStatsRequest(target_path=target)
    return s.runtime.stub.GetVolumeStats(request, timeout=CALL_S)


async def _total(s: Subject, target: str) -> int:
    answer = await _stats(s, target)
    s.transcript.append(f"<- {' '.join(str(answer).split())}")
    found = [each.total for each in answer.usage if each.unit == types_pb2.VolumeUsage.BYTES]
    expect(found, "usage in bytes is missing")
    return int(found[0])


@case(
    "R-301", "the registration names block volumes, filesystems and an endpoint", "handlers.proto"
)
async def registration(s: Subject) -> None:
    request = s.runtime.request
    expect(types_pb2.VolumeType.BLOCK in request.volume_types, "volume_types lacks BLOCK")
    expect("ext4" in request.filesystems, "filesystems lacks ext4, which these cases use")
    expect(request.endpoint.startswith("/"), "endpoint is no absolute path")


@case(
    "R-302", "GetVolumeStats reports the mounted filesystem", "handlers.proto", needs=Feature.STATS
)
async def stats(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    total = await _total(s, target)
    expect(SIZE // 2 < total <= SIZE, f"total is {total}, and the device has {SIZE}")


@case(
    "R-303",
    "GetVolumeStats without a sandbox is FAILED_PRECONDITION",
    "handlers.proto",
    needs=Feature.STATS,
)
async def no_sandbox(s: Subject) -> None:
    target = await s.volume()
    code = await _code(s, _stats(s, target))
    expect(code == "FAILED_PRECONDITION", f"the code is {code}")


@case(
    "R-304",
    "a filesystem smaller than its device has grown once it is mounted",
    "H-48",
    needs=Feature.STATS,
)
async def grown(s: Subject) -> None:
    target = s.publish(await s.formatted(SIZE // 4))
    await s.started("box-1", target)
    total = await _total(s, target)
    expect(total > SIZE // 2, f"the filesystem has {total} bytes, the device {SIZE}")


@case(
    "R-305",
    "ExpandVolume answers the size of the device, twice",
    "handlers.proto",
    needs=Feature.ONLINE_EXPAND,
)
async def expand(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    for _ in range(2):
        wanted = types_pb2.CapacityRange(required_bytes=SIZE)
        request = handlers_pb2.ExpandVolumeRequest(target_path=target, capacity_range=wanted)
        s.transcript.append(f"-> ExpandVolume {SIZE}")
        answer = await s.runtime.stub.ExpandVolume(request, timeout=CALL_S)
        expect(answer.capacity_bytes >= SIZE - MIB, f"capacity_bytes is {answer.capacity_bytes}")


@case(
    "R-306",
    "a freeze is thawed once; a second thaw says that nothing was frozen",
    "handlers.proto",
    needs=Feature.FREEZE,
)
async def freeze(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    stub = s.runtime.stub
    frozen = handlers_pb2.FreezeVolumeRequest(target_path=target, thaw_after_seconds=30)
    await stub.FreezeVolume(frozen, timeout=CALL_S)
    thaw = handlers_pb2.ThawVolumeRequest(target_path=target)
    expect((await stub.ThawVolume(thaw, timeout=CALL_S)).was_frozen, "was_frozen is false")
    expect(not (await stub.ThawVolume(thaw, timeout=CALL_S)).was_frozen, "was_frozen is true")


@case(
    "R-307", "FreezeVolume is UNIMPLEMENTED without FREEZE", "handlers.proto", lacks=Feature.FREEZE
)
async def no_freeze(s: Subject) -> None:
    request = handlers_pb2.FreezeVolumeRequest(target_path="/nowhere", thaw_after_seconds=1)
    s.transcript.append("-> FreezeVolume /nowhere")
    code = await _code(s, s.runtime.stub.FreezeVolume(request, timeout=CALL_S))
    expect(code == "UNIMPLEMENTED", f"the code is {code}")
