"""The words of mount(8)."""

import pytest

from crust.host.mounts import mount_options
from tests.support.raised import raised

REMOUNT = ("errors", "remount-ro")

NOSUID, NODEV, NOATIME, STRICTATIME = 0x02, 0x04, 0x10, 0x20


def parse(*words: str) -> tuple[int, mount_options.Parameters]:
    return mount_options.for_kernel("ext4", words)


def test_parse_sorts_options_into_attributes_and_parameters() -> None:
    label = ("context", "system_u:object_r:t:s0:c1,c2")
    words = ("nosuid", "nodev", "commit=5", "data=", "discard", f'context="{label[1]}"')
    attributes, parameters = parse(*words)
    assert attributes == NOSUID | NODEV
    assert parameters == (REMOUNT, ("commit", "5"), ("data", ""), ("discard", None), label)


def test_parse_later_option_overrides_an_earlier_one_and_the_default() -> None:
    assert parse("nosuid", "suid") == (0, (REMOUNT,))
    assert parse("noatime", "strictatime")[0] == STRICTATIME
    assert parse("strictatime", "noatime")[0] == NOATIME
    assert parse("errors=continue")[1] == (REMOUNT, ("errors", "continue"))


@pytest.mark.parametrize(
    ("fs_type", "word"), [("ext4", "errors=panic"), ("btrfs", "fatal_errors=panic")]
)
def test_parse_refuses_options_that_stop_the_host(fs_type: str, word: str) -> None:
    with pytest.raises(mount_options.InvalidMountOption, match="stop the node"):
        mount_options.for_kernel(fs_type, [word])


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
        ("ext4", "source=/dev/sda"),
        ("ext4", "loop=/dev/loop0"),
        ("ext4", "bind"),
        ("ext4", "remount"),
        ("ext4", ""),
    ],
)
def test_parse_refuses_options_that_the_filesystem_may_not_have(fs_type: str, word: str) -> None:
    with pytest.raises(mount_options.InvalidMountOption, match="may have"):
        mount_options.for_kernel(fs_type, [word])


@pytest.mark.parametrize("words", [(), ("suid", "dev")])
def test_parse_of_untrusted_filesystem_is_always_nosuid_and_nodev(
    words: tuple[str, ...],
) -> None:
    assert mount_options.for_kernel("xfs", words, untrusted=True) == (NOSUID | NODEV, ())


@pytest.mark.parametrize("word", ["=secret", "a\0b=secret"])
def test_parse_error_does_not_repeat_values(word: str) -> None:
    with pytest.raises(mount_options.InvalidMountOption) as caught:
        parse(word)
    assert "secret" not in str(caught.value)


def test_last_of_ro_and_rw_wins() -> None:
    assert not mount_options.readonly(["ro", "rw"])
    assert mount_options.readonly(["rw,ro"])


def test_quoted_label_with_commas_is_one_option_of_the_host() -> None:
    flag = 'context="system_u:object_r:container_file_t:s0:c1,c2",noatime'
    assert mount_options.parse([flag], for_guest=False) == (
        flag.rpartition(",")[0],
        "noatime",
    )
    assert mount_options.parse([flag], for_guest=True) == ("noatime",)


@pytest.mark.parametrize("word", ["bind", "remount,ro", "move", "rbind"])
def test_options_that_change_other_mounts_are_refused(word: str) -> None:
    with raised("MountOptionNotAllowed"):
        mount_options.parse([word], for_guest=False)
