"""Registration, and the calls that the proxy makes."""

from typing import Any

from google.protobuf.message import Message

from crust.core import volumes
from crust.rpc.status import PeerStatus
from crust.wire.v1 import handlers_pb2, types_pb2
from crust_conformance.runtimes.subject import MIB, SIZE, RuntimeUnderTest

CALL_S = 60.0


async def _answer(subject: RuntimeUnderTest, request: Message, code: str = "OK") -> Any:
    """The answer of the request's RPC, which must have this code."""
    name = request.DESCRIPTOR.name.removesuffix("Request")
    subject.transcript.append(f"-> {name} {' '.join(str(request).split())}")
    answer, answered, text = None, "OK", ""
    try:
        answer = await getattr(subject.runtime.stub, name)(request, timeout=CALL_S)
        text = " ".join(str(answer).split())
    except PeerStatus as status:
        answered, text = status.code.name, status.text
    subject.transcript.append(f"<- {answered}: {text}")
    assert answered == code, f"the code of {name} is {answered}"
    return answer


async def _total(subject: RuntimeUnderTest, target: str) -> int:
    answer = await _answer(subject, handlers_pb2.GetVolumeStatsRequest(target_path=target))
    totals = [usage.total for usage in answer.usage if usage.unit == types_pb2.VolumeUsage.BYTES]
    assert totals, "usage in bytes is missing"
    return int(totals[0])


def _expand(target: str, size: int) -> handlers_pb2.ExpandVolumeRequest:
    size_range = types_pb2.CapacityRange(required_bytes=size)
    return handlers_pb2.ExpandVolumeRequest(target_path=target, capacity_range=size_range)


def _freeze(target: str) -> handlers_pb2.FreezeVolumeRequest:
    return handlers_pb2.FreezeVolumeRequest(target_path=target, thaw_after_seconds=30)


def _thaw(target: str) -> handlers_pb2.ThawVolumeRequest:
    return handlers_pb2.ThawVolumeRequest(target_path=target)


async def test_r301_registration(subject: RuntimeUnderTest) -> None:
    request = subject.runtime.request
    assert types_pb2.VolumeType.BLOCK in request.volume_types, "volume_types lacks BLOCK"
    assert "ext4" in request.filesystems, "filesystems lacks ext4, which these cases use"
    assert request.endpoint.startswith("/"), "endpoint is no absolute path"


async def test_r302_stats(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    total = await _total(subject, target)
    assert SIZE // 2 < total <= SIZE, f"total is {total}, and the device has {SIZE}"


async def test_r303_no_sandbox(subject: RuntimeUnderTest) -> None:
    request = handlers_pb2.GetVolumeStatsRequest(target_path=await subject.volume())
    await _answer(subject, request, "FAILED_PRECONDITION")


async def test_r304_grown(subject: RuntimeUnderTest) -> None:
    target = subject.publish(await subject.formatted(SIZE // 4))
    await subject.started("box-1", target)
    total = await _total(subject, target)
    assert total > SIZE // 2, f"the filesystem has {total} bytes, the device {SIZE}"


async def test_r305_expand(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    target = subject.publish(device)
    await subject.started("box-1", target)
    size = SIZE + SIZE // 2
    subject.grow(device, size)
    for _ in range(2):
        answer = await _answer(subject, _expand(target, size))
        assert answer.capacity_bytes >= size - MIB, f"capacity_bytes is {answer.capacity_bytes}"
    if volumes.HandlerFeature.STATS in subject.runtime.features:
        total = await _total(subject, target)
        assert total > SIZE, f"the filesystem has {total} bytes, the device {size}"


async def test_r306_freeze(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await _answer(subject, _freeze(target))
    assert (await _answer(subject, _thaw(target))).was_frozen, "was_frozen is false"
    assert not (await _answer(subject, _thaw(target))).was_frozen, "was_frozen is true"


async def test_r307_no_freeze(subject: RuntimeUnderTest) -> None:
    await _answer(subject, _freeze("/nowhere"), "UNIMPLEMENTED")


async def test_r308_expand_without_sandbox(subject: RuntimeUnderTest) -> None:
    await _answer(subject, _expand(await subject.volume(), SIZE), "FAILED_PRECONDITION")


async def test_r309_freeze_without_sandbox(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    await _answer(subject, _freeze(target), "FAILED_PRECONDITION")
    await _answer(subject, _thaw(target), "FAILED_PRECONDITION")


async def test_r310_limits(subject: RuntimeUnderTest) -> None:
    target = await subject.volume(io_limits=volumes.IoLimits(read_iops=1000))
    limits = types_pb2.IoLimits(read_iops=500)
    request = handlers_pb2.SetVolumeLimitsRequest(target_path=target, limits=limits)
    await _answer(subject, request, "FAILED_PRECONDITION")
    await subject.started("box-1", target)
    for _ in range(2):
        await _answer(subject, request)
