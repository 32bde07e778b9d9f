"""What is said of a publish that left no block device."""

from pathlib import Path

import pytest

from crust.core import volumes
from crust.csi_shim.wrap import leaves
from tests.support.raised import raised


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("diskplugin.csi.alibabacloud.com", "RuntimeClass rund or runv"),
        ("block.csi.example.com", "may not support raw block volumes"),
    ],
)
def test_driver_that_published_no_device_is_named_with_what_is_known_of_it(
    driver: str, remedy: str, tmp_path: Path
) -> None:
    key = volumes.VolumeKey(volumes.DriverName(driver), volumes.VolumeId("d-1"))
    with raised("NotPublishedAsBlock") as caught:
        leaves.device(key, str(tmp_path / "leaf"), None)
    assert driver in caught.value.why
    assert remedy in (caught.value.hint or "")
