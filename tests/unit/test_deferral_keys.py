"""The keys of a volume context that say how a volume is deferred."""

import pytest

from crust import deferral_keys, errors, volumes
from crust.deferral_keys import Defer


@pytest.mark.parametrize("value", Defer)
def test_every_value_of_defer_is_read(value: Defer) -> None:
    assert deferral_keys.defer({"crust.dev/defer": value.value}) is value


def test_volume_that_says_nothing_decides_nothing() -> None:
    assert deferral_keys.defer({"other": "always"}) is None


@pytest.mark.parametrize("value", ["", "Always", "yes", "runtimeclass"])
def test_other_value_of_defer_is_refused_with_the_allowed_ones(value: str) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey, match="always, never, runtime-class"):
        deferral_keys.defer({"crust.dev/defer": value})


def test_volume_is_formatted_only_if_it_was_created_empty() -> None:
    options = {"crust.dev/ext4-bytes-per-inode": "16384", "crust.dev/ext4-reserved-percent": "0"}
    assert deferral_keys.guest_format(options) is None
    assert deferral_keys.guest_format({"crust.dev/created-empty": "false", **options}) is None
    made = deferral_keys.guest_format({"crust.dev/created-empty": "true", **options})
    assert made == volumes.GuestFormat(16384, 0)
    assert deferral_keys.guest_format({"crust.dev/created-empty": "true"}) == volumes.GuestFormat()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crust.dev/created-empty", "True"),
        ("crust.dev/ext4-bytes-per-inode", "12"),
        ("crust.dev/ext4-bytes-per-inode", "0x4000"),
        ("crust.dev/ext4-reserved-percent", "51"),
        ("crust.dev/ext4-reserved-percent", "-1"),
    ],
)
def test_invalid_format_option_is_refused(key: str, value: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        deferral_keys.guest_format({"crust.dev/created-empty": "true", key: value})


def test_a_wrapped_driver_gets_no_key_of_crust() -> None:
    context = {"crust.dev/defer": "always", "vendor/key": "1", "plain": "2"}
    assert deferral_keys.without(context) == {"vendor/key": "1", "plain": "2"}
