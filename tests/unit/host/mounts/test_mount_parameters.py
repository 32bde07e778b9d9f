"""Words of mount(8), sorted."""

import pytest

from crust.host.mounts import mount_parameters

NOSUID, NODEV, NOATIME, STRICTATIME = 0x02, 0x04, 0x10, 0x20


def parse(*words: str, readonly: bool = False) -> mount_parameters.MountParameters:
    return mount_parameters.parse("ext4", words, readonly=readonly)


def test_words_are_sorted_into_attributes_and_parameters() -> None:
    wanted = parse("nosuid,nodev", "commit=5", "discard")
    assert wanted.attributes == NOSUID | NODEV
    assert wanted.parameters == (("commit", "5"), ("discard", None))
    assert not wanted.readonly


def test_a_later_word_wins() -> None:
    assert parse("nosuid", "suid").attributes == 0
    assert parse("noatime", "strictatime").attributes == STRICTATIME
    assert parse("strictatime", "noatime").attributes == NOATIME
    assert not parse("ro", "rw").readonly


def test_readonly_asked_for_wins_over_rw() -> None:
    assert parse("rw", readonly=True).readonly


def test_words_for_user_space_are_dropped() -> None:
    assert parse("defaults", "nofail", "_netdev", "x-systemd.automount", "x-a=b").parameters == ()


def test_a_comma_in_quotes_belongs_to_the_value() -> None:
    wanted = parse('context="system_u:object_r:t:s0:c1,c2",nodev')
    assert wanted.parameters == (("context", "system_u:object_r:t:s0:c1,c2"),)


def test_an_empty_value_is_a_value() -> None:
    assert parse("jqfmt=").parameters == (("jqfmt", ""),)


@pytest.mark.parametrize("word", ["bind", "remount", "move", "rshared", "loop=/dev/loop0"])
def test_another_kind_of_mount_is_refused(word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="another kind of mount"):
        parse(word)


def test_the_device_cannot_be_swapped_by_an_option() -> None:
    with pytest.raises(mount_parameters.InvalidMountOption, match="device"):
        parse("source=/dev/sda")


@pytest.mark.parametrize("word", ["=secret", "a\0b=secret"])
def test_a_refusal_does_not_repeat_values(word: str) -> None:
    with pytest.raises(mount_parameters.InvalidMountOption) as caught:
        parse(word)
    assert "secret" not in str(caught.value)
