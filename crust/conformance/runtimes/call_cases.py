"""Registration, and the calls that the proxy makes."""

from collections.abc import Awaitable
from typing import Any

from crust.conformance.runtimes.subject import MIB, SIZE, Subject
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
    target = await s.volume()
    await s.started("box-1", target)
    for _ in range(2):
        wanted = types_pb2.CapacityRange(required_bytes=SIZE)
        request = handlers_pb2.ExpandVolumeRequest(target_path=target, capacity_range=wanted)
        s.transcript.append(f"-> ExpandVolume {SIZE}")
        answer = await s.runtime.stub.ExpandVolume(request, timeout=CALL_S)
        assert answer.capacity_bytes >= SIZE - MIB, f"capacity_bytes is {answer.capacity_bytes}"


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
