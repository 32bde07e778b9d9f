"""What the API of crust says of a volume survives the wire, and a registration is read."""

from typing import Any

from crust.core import volumes
from crust.rpc.messages import crust_v1, csi
from crust.wire.v1 import handlers_pb2, types_pb2


def test_statistics_survive_the_wire_with_and_without_a_condition() -> None:
    usage = (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 10, 4, 6),)
    for condition in (None, volumes.VolumeCondition(abnormal=True, message="gone")):
        value = volumes.VolumeStats(usage, condition)
        answer: Any = csi.stats_to_wire(value)
        reported = answer.volume_condition if answer.HasField("volume_condition") else None
        assert crust_v1.stats(answer.usage, reported) == value


def test_registration_with_long_version_keeps_its_beginning() -> None:
    request = handlers_pb2.RegisterRequest(
        name="kata",
        version="1.2 " + "x" * 100_000,
        endpoint="/run/kata.sock",
        volume_types=[types_pb2.VolumeType.BLOCK],
        filesystems=["ext4"],
    )
    kept = crust_v1.registration(request).version
    assert request.version.startswith(kept)
    assert len(kept) == crust_v1.VERSION_MAX_CHARS
