"""What a guest says of itself."""

from examples.kata.vm import values

_USAGE = {
    "total_bytes": 100,
    "available_bytes": 60,
    "used_bytes": 40,
    "total_inodes": 10,
    "available_inodes": 9,
    "used_inodes": 1,
}


def test_guest_usage_is_clamped_to_the_disk_size() -> None:
    usage = values.Usage.model_validate({**_USAGE, "total_bytes": 2**60})
    assert usage.clamped(100).total_bytes == 100
    assert usage.clamped(100).available_bytes == 60
