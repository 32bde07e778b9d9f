"""Words of mount(8), sorted."""

import pytest

from crust.host.mounts import mount_parameters

REMOUNT = ("errors", "remount-ro")
NOSUID, NODEV, NOATIME, STRICTATIME = 0x02, 0x04, 0x10, 0x20


def parse(*words: str, readonly: bool = False) -> mount_parameters.MountParameters:
    return mount_parameters.parse("ext4", words, readonly=readonly)


def test_parse_sorts_options_into_attributes_and_parameters() -> None:
    wanted = parse("nosuid,nodev", "commit=5", "discard")
    assert wanted.attributes == NOSUID | NODEV
    assert wanted.parameters == (REMOUNT, ("commit", "5"), ("discard", None))
    assert not wanted.readonly


def test_parse_later_option_overrides_an_earlier_one() -> None:
    assert parse("nosuid", "suid").attributes == 0
    assert parse("noatime", "strictatime").attributes == STRICTATIME
    assert parse("strictatime", "noatime").attributes == NOATIME
    assert not parse("ro", "rw").readonly


def test_parse_readonly_argument_overrides_rw() -> None:
    assert parse("rw", readonly=True).readonly


def test_parse_drops_user_space_options() -> None:
    assert parse("defaults", "nofail", "_netdev", "x-systemd.automount", "x-a=b").parameters == (
        REMOUNT,
    )


def test_parse_keeps_a_quoted_comma_in_the_value() -> None:
    wanted = parse('context="system_u:object_r:t:s0:c1,c2",nodev')
    assert wanted.parameters == (REMOUNT, ("context", "system_u:object_r:t:s0:c1,c2"))


def test_parse_keeps_an_empty_value() -> None:
    assert parse("data=").parameters == (REMOUNT, ("data", ""))


def test_parse_lets_the_operator_override_what_happens_on_errors() -> None:
    assert parse("errors=continue").parameters == (REMOUNT, ("errors", "continue"))


@pytest.mark.parametrize(
    ("fs_type", "word"), [("ext4", "errors=panic"), ("btrfs", "fatal_errors=panic")]
)
def test_parse_refuses_options_that_stop_the_host(fs_type: str, word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="stop the node"):
        mount_parameters.parse(fs_type, [word])


@pytest.mark.parametrize(
    ("fs_type", "word"),
    [
        ("xfs", "logdev=/dev/loop7"),
        ("xfs", "rtdev=/dev/sda"),
        ("ext4", "journal_path=/dev/loop7"),
        ("ext4", "journal_dev=0x700"),
        ("ext4", "sb=32768"),
        ("ext4", "usrjquota=/etc/passwd"),
        ("btrfs", "device=/dev/sda"),
        ("ext4", "nouuid"),
    ],
)
def test_parse_refuses_options_that_the_filesystem_may_not_have(fs_type: str, word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="may have"):
        mount_parameters.parse(fs_type, [word])


@pytest.mark.parametrize("word", ["", "suid,dev"])
def test_parse_of_an_untrusted_filesystem_is_nosuid_and_nodev_whatever_is_asked(word: str) -> None:
    wanted = mount_parameters.parse("xfs", [word], untrusted=True)
    assert wanted.attributes == NOSUID | NODEV


@pytest.mark.parametrize("word", ["bind", "remount", "move", "rshared", "loop=/dev/loop0"])
def test_parse_refuses_options_of_other_mount_kinds(word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="another kind of mount"):
        parse(word)


def test_parse_refuses_the_source_option() -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="may have"):
        parse("source=/dev/sda")


@pytest.mark.parametrize("word", ["=secret", "a\0b=secret"])
def test_parse_error_does_not_repeat_values(word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption) as caught:
        parse(word)
    assert "secret" not in str(caught.value)
