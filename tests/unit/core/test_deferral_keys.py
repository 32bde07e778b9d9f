"""The keys of a volume context that say how a volume is deferred."""

import pytest

from crust.core import deferral_keys, errors, volumes
from tests.support.raised import raised


@pytest.mark.parametrize("value", ["", "Always", "yes", "runtimeclass", "a" * 500])
def test_other_value_of_defer_is_refused_with_the_allowed_ones(value: str) -> None:
    with pytest.raises(
        deferral_keys.InvalidDeferKey, match="always, never, runtime-class"
    ) as caught:
        deferral_keys.defer({"crust.dev/defer": value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({}, True),
        ({"crust.dev/defer": "never"}, False),
        ({"crust.dev/defer": "never", "vendor": "x"}, False),
        ({"crust.dev/defer": "always"}, True),
        ({"crust.dev/defer": "runtime-class"}, True),
        ({"crust.dev/defer": "Never"}, True),
        ({"crust.dev/defer": "never", "crust.dev/encryption": "luks"}, True),
        ({"crust.dev/defer": "never", "crust.dev/format-in": "guest"}, True),
    ],
)
def test_volume_may_be_deferred_unless_its_context_excludes_it(
    context: dict[str, str], *, expected: bool
) -> None:
    assert deferral_keys.may_defer(context) is expected


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
        ("crust.dev/ext4-bytes-per-inode", "1" * 5000),
        ("crust.dev/ext4-bytes-per-inode", "12"),
        ("crust.dev/ext4-bytes-per-inode", "0x4000"),
        ("crust.dev/ext4-reserved-percent", "51"),
        ("crust.dev/ext4-reserved-percent", "-1"),
    ],
)
def test_invalid_format_option_is_refused(key: str, value: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        deferral_keys.guest_format({"crust.dev/created-empty": "true", key: value})


def test_host_grows_a_filesystem_if_the_class_says_so() -> None:
    grows = {"crust.dev/grow-in": "host"}
    assert not deferral_keys.grows_on_host({})
    assert deferral_keys.grows_on_host(grows)
    for more in ({"crust.dev/format-in": "guest"}, {"crust.dev/encryption": "luks"}):
        assert not deferral_keys.grows_on_host(more)
        with pytest.raises(deferral_keys.InvalidDeferKey, match="left out where"):
            deferral_keys.grows_on_host(grows | more)
    with pytest.raises(deferral_keys.InvalidDeferKey, match="it must be host"):
        deferral_keys.grows_on_host({"crust.dev/grow-in": "guest"})


def test_encryption_is_luks_or_nothing_formatted_by_guests_alone() -> None:
    assert deferral_keys.encryption({}) is None
    luks = {"crust.dev/encryption": "luks"}
    assert deferral_keys.encryption(luks) is volumes.Encryption.LUKS
    guest = {"crust.dev/format-in": "guest"}
    contexts: tuple[dict[str, str], ...] = ({}, guest, luks)
    values = [deferral_keys.format_in(context) for context in contexts]
    assert values == ["host", "guest", "luks"]
    assert [deferral_keys.strictest_format_in(context) for context in contexts] == values
    assert deferral_keys.format_in(guest | luks) == "luks"


@pytest.mark.parametrize(
    ("context", "allowed"),
    [
        ({"crust.dev/encryption": "LUKS"}, "it must be luks"),
        ({"crust.dev/encryption": ""}, "it must be luks"),
        ({"crust.dev/format-in": "host"}, "it must be guest"),
        ({"crust.dev/encryption": "luks", "crust.dev/defer": "never"}, "always or runtime-class"),
        ({"crust.dev/format-in": "guest", "crust.dev/defer": "never"}, "always or runtime-class"),
    ],
)
def test_context_that_contradicts_itself_is_refused(context: dict[str, str], allowed: str) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey, match=allowed):
        deferral_keys.format_in(context)


def test_passphrase_is_the_first_that_is_given() -> None:
    of_stage, of_publish = {"passphrase": "old"}, {"passphrase": "new", "other": "x"}
    assert deferral_keys.passphrase("vol-1", of_publish, of_stage) == "new"
    assert deferral_keys.passphrase("vol-1", {"passphrase": ""}, of_stage) == "old"
    with raised("PassphraseMissing", match="node-publish-secret-name"):
        deferral_keys.passphrase("vol-1", {}, {"other": "x"})


def test_encrypted_volume_is_not_published_on_host_even_raw() -> None:
    for is_block in (False, True):
        with raised("EncryptedOnHost"):
            deferral_keys.check_host_publish("vol-1", "luks", is_block=is_block)
    with raised("FilesystemOfGuest"):
        deferral_keys.check_host_publish("vol-1", "guest", is_block=False)
    deferral_keys.check_host_publish("vol-1", "guest", is_block=True)


def test_invalid_value_of_a_key_is_strict_on_the_host() -> None:
    for contradicting in ("LUKS", "", "none"):
        context = {"crust.dev/defer": "never", "crust.dev/encryption": contradicting}
        assert deferral_keys.strictest_format_in(context) == "luks"
    assert deferral_keys.strictest_format_in({"crust.dev/format-in": "host"}) == "guest"
