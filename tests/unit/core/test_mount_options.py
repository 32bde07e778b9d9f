"""The mount options for a guest, and the refused ones."""

import pytest

from crust.core import mount_options
from tests.support.raised import raised


def test_host_only_options_do_not_reach_the_guest_and_ro_becomes_a_field() -> None:
    options = mount_options.for_guest(["noatime,_netdev", "ro", "x-systemd.automount", "rshared"])
    assert options == mount_options.MountOptions(("noatime",), readonly=True)


def test_the_last_of_ro_and_rw_wins() -> None:
    assert mount_options.for_host(["ro", "rw"]).readonly is False
    assert mount_options.for_host(["rw,ro"]).readonly is True


def test_quoted_label_with_commas_is_one_option_and_stays_on_the_host() -> None:
    flag = 'context="system_u:object_r:container_file_t:s0:c1,c2",noatime'
    assert mount_options.for_host([flag]).options == (flag.rpartition(",")[0], "noatime")
    assert mount_options.for_guest([flag]).options == ("noatime",)


@pytest.mark.parametrize(
    "word", ["password=x1y2", "secret", "keyfile=/x1y2", "src=https://u:x1y2@h/"]
)
def test_a_credential_is_refused_and_its_value_is_not_in_the_error(word: str) -> None:
    with raised("CredentialInOptions") as caught:
        mount_options.for_guest(["noatime", word])
    assert "x1y2" not in str(caught.value)


@pytest.mark.parametrize("word", ["bind", "remount,ro", "move", "rbind"])
def test_options_that_change_other_mounts_are_refused(word: str) -> None:
    with raised("MountOptionNotAllowed"):
        mount_options.for_host([word])
