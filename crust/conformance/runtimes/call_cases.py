"""Registration, and the calls that the proxy makes."""

from collections.abc import Awaitable
from typing import Any

from crust.conformance.runtimes.subject import MIB, SIZE, Subject
from crust.core import volumes
from crust.rpc.status import PeerStatus
from crust.wire.v1 import handlers_pb2, types_pb2

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
    assert found, "usage in bytes is missing"
    return int(found[0])


async def test_r301_registration(s: Subject) -> None:
    request = s.runtime.request
    assert types_pb2.VolumeType.BLOCK in request.volume_types, "volume_types lacks BLOCK"
    assert "ext4" in request.filesystems, "filesystems lacks ext4, which these cases use"
    assert request.endpoint.startswith("/"), "endpoint is no absolute path"


async def test_r302_stats(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    total = await _total(s, target)
    assert SIZE // 2 < total <= SIZE, f"total is {total}, and the device has {SIZE}"


async def test_r303_no_sandbox(s: Subject) -> None:
    target = await s.volume()
    code = await _code(s, _stats(s, target))
    assert code == "FAILED_PRECONDITION", f"the code is {code}"


async def test_r304_grown(s: Subject) -> None:
    target = s.publish(await s.formatted(SIZE // 4))
    await s.started("box-1", target)
    total = await _total(s, target)
    assert total > SIZE // 2, f"the filesystem has {total} bytes, the device {SIZE}"


async def test_r305_expand(s: Subject) -> None:
    device = await s.formatted()
    target = s.publish(device)
    await s.started("box-1", target)
    size = SIZE + SIZE // 2
    s.grow(device, size)
    for _ in range(2):
        wanted = types_pb2.CapacityRange(required_bytes=size)
        request = handlers_pb2.ExpandVolumeRequest(target_path=target, capacity_range=wanted)
        s.transcript.append(f"-> ExpandVolume {size}")
        answer = await s.runtime.stub.ExpandVolume(request, timeout=CALL_S)
        assert answer.capacity_bytes >= size - MIB, f"capacity_bytes is {answer.capacity_bytes}"
    if volumes.HandlerFeature.STATS in s.runtime.features:
        total = await _total(s, target)
        assert total > SIZE, f"the filesystem has {total} bytes, the device {size}"


async def test_r306_freeze(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    stub = s.runtime.stub
    frozen = handlers_pb2.FreezeVolumeRequest(target_path=target, thaw_after_seconds=30)
    await stub.FreezeVolume(frozen, timeout=CALL_S)
    thaw = handlers_pb2.ThawVolumeRequest(target_path=target)
    assert (await stub.ThawVolume(thaw, timeout=CALL_S)).was_frozen, "was_frozen is false"
    assert not (await stub.ThawVolume(thaw, timeout=CALL_S)).was_frozen, "was_frozen is true"


async def test_r307_no_freeze(s: Subject) -> None:
    request = handlers_pb2.FreezeVolumeRequest(target_path="/nowhere", thaw_after_seconds=1)
    s.transcript.append("-> FreezeVolume /nowhere")
    code = await _code(s, s.runtime.stub.FreezeVolume(request, timeout=CALL_S))
    assert code == "UNIMPLEMENTED", f"the code is {code}"


async def _is_refused(s: Subject, call: str, request: Any) -> None:
    """Nothing stands for a volume that no sandbox has: the call is a precondition that failed."""
    s.transcript.append(f"-> {call} {request.target_path}")
    code = await _code(s, getattr(s.runtime.stub, call)(request, timeout=CALL_S))
    assert code == "FAILED_PRECONDITION", f"the code of {call} is {code}"


async def test_r308_expand_without_sandbox(s: Subject) -> None:
    wanted = types_pb2.CapacityRange(required_bytes=SIZE)
    target = await s.volume()
    request = handlers_pb2.ExpandVolumeRequest(target_path=target, capacity_range=wanted)
    await _is_refused(s, "ExpandVolume", request)


async def test_r309_freeze_without_sandbox(s: Subject) -> None:
    target = await s.volume()
    freeze = handlers_pb2.FreezeVolumeRequest(target_path=target, thaw_after_seconds=1)
    await _is_refused(s, "FreezeVolume", freeze)
    await _is_refused(s, "ThawVolume", handlers_pb2.ThawVolumeRequest(target_path=target))


async def test_r310_limits(s: Subject) -> None:
    target = await s.volume(io_limits=volumes.IoLimits(read_iops=1000))
    limits = types_pb2.IoLimits(read_iops=500)
    request = handlers_pb2.SetVolumeLimitsRequest(target_path=target, limits=limits)
    await _is_refused(s, "SetVolumeLimits", request)
    await s.started("box-1", target)
    for _ in range(2):
        s.transcript.append("-> SetVolumeLimits read_iops=500")
        code = await _code(s, s.runtime.stub.SetVolumeLimits(request, timeout=CALL_S))
        assert code == "OK", f"the code is {code}"
