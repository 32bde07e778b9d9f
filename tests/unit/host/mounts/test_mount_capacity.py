"""How many volumes a node can hold is what its scarcest resource allows."""

import pytest

from crust.host.mounts import mount_capacity

MIB = 1024 * 1024
PLENTY = 1 << 50


@pytest.mark.parametrize(
    ("memory_bytes", "threads", "mounts", "fit"),
    [
        (24 * 1024 * MIB, 32768, 100_000, 1024),
        (2 * 1024 * MIB, 32768, 100_000, 102),
        (PLENTY, 4096, PLENTY, 128),
        (PLENTY, PLENTY, 400, 100),
        (16 * MIB, PLENTY, PLENTY, 1),
    ],
)
def test_estimate_is_limited_by_the_scarcest_resource(
    memory_bytes: int, threads: int, mounts: int, fit: int
) -> None:
    found = mount_capacity.estimate(memory_bytes=memory_bytes, threads=threads, mounts=mounts)
    assert found == fit


def test_max_volumes_on_this_kernel_is_positive() -> None:
    assert mount_capacity.max_volumes() >= 1
