"""The packages of a guest."""

from examples.kata.guest import packages


def test_a_package_is_fetched_by_its_version_epoch_included() -> None:
    package = packages.Package("zlib1g_1%3a1.2.13.dfsg-1_amd64.deb", "0" * 64)
    assert packages._spec(package) == "zlib1g=1:1.2.13.dfsg-1"
