"""What the API of crust says of a volume survives the wire."""

from typing import Any

from crust.core import volumes
from crust.rpc.messages import crust_v1, csi


def test_statistics_survive_the_wire_with_and_without_a_condition() -> None:
    usage = (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 10, 4, 6),)
    for condition in (None, volumes.VolumeCondition(abnormal=True, message="gone")):
        value = volumes.VolumeStats(usage, condition)
        answer: Any = csi.stats_to_wire(value)
        reported = answer.volume_condition if answer.HasField("volume_condition") else None
        assert crust_v1.stats(answer.usage, reported) == value
