"""Which version of etcd has which hole in its access control."""

import pytest

from crust.cluster.etcd.client import versions

NESTED, FROM_KEY, LEASES, PREVIOUS = (hole.name for hole in versions.HOLES)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("3.3.27", {NESTED, FROM_KEY, LEASES, PREVIOUS}),
        ("3.4.23", {NESTED, FROM_KEY, LEASES, PREVIOUS}),
        ("3.4.42", {FROM_KEY, PREVIOUS}),
        ("3.4.45", {FROM_KEY}),
        ("3.5.27", {NESTED, FROM_KEY, LEASES, PREVIOUS}),
        ("3.5.28", {FROM_KEY, PREVIOUS}),
        ("3.5.30", {FROM_KEY}),
        ("3.5.33", set()),
        ("3.6.8", {NESTED, FROM_KEY, LEASES, PREVIOUS}),
        ("3.6.14", set()),
        ("3.7.0", set()),
        ("4.0.0-rc.1", set()),
        ("unknown", {NESTED, FROM_KEY, LEASES, PREVIOUS}),
    ],
)
def test_holes_of_a_version_are_those_not_fixed_in_its_line(version: str, names: set[str]) -> None:
    assert {hole.name for hole in versions.holes(version)} == names
