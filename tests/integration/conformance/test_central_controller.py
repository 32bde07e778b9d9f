"""The suite against a central controller and one of its nodes, each a process with a socket, through a real etcd.

The etcd has TLS and access by role. A restart kills both parts with SIGKILL, and the controller's successor has to
wait for the lease of the one that was killed.
"""

import os
from pathlib import Path

import pytest

from crust.conformance import suite
from crust.conformance.options import MIB, Options, Parameters, Profile
from tests.support.drivers import own_driver

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]

# What needs a second node, or a driver that expands volumes offline only; as with the driver alone.
_NOT_APPLICABLE = {"C-165", "C-176", "C-235"}
_OTHER_PROFILE: dict[Profile, set[str]] = {
    "1.12": {"C-145", "C-146", "C-158", "C-261", "C-262"},
    "1.13": {"C-244"},
}
_IDENTITY = ("C-001", "C-002", "C-003", "C-004")


@pytest.mark.parametrize("profile", ["1.12", "1.13"])
def test_a_central_controller_and_its_node_conform(base: Path, profile: Profile) -> None:
    is_complete = profile == "1.13" or "TESTS_REPORTS" in os.environ
    only = () if is_complete else (*_IDENTITY, "C-005", "C-006", *sorted(_OTHER_PROFILE["1.13"]))
    with own_driver.serving(base, profile, "central") as driver:
        outcome = suite.run(_options(driver, profile, only))
        alone = suite.run(_options(driver, profile, _IDENTITY, is_node_alone=True))
    assert outcome.results.numbers("failed", "warning", "note") == frozenset()
    assert outcome.exit_code == 0
    skipped = _NOT_APPLICABLE | _OTHER_PROFILE[profile]
    assert set(outcome.skipped) == (skipped & set(only) if only else skipped)
    assert set(alone.passed) == set(_IDENTITY)


def _options(
    driver: own_driver.OwnDriver,
    profile: Profile,
    only: tuple[str, ...],
    *,
    is_node_alone: bool = False,
) -> Options:
    return Options(
        socket=str(driver.socket),
        controller_socket="" if is_node_alone else driver.controller_socket,
        target_root=driver.target_root,
        profile=profile,
        parameters=Parameters(
            ephemeral_context={"size": "320Mi"},
            mutable_parameters={"writeIOPS": "0", "readBytesPerSecond": "0"},
            size_bytes=320 * MIB,  # xfs cannot be smaller; the files are sparse
            raw_size_bytes=64 * MIB,
            fs_types=("xfs", "ext4", "btrfs"),
        ),
        log=driver.log,
        restart_command=driver.restart_command,
        only=only,
        strict=True,
        timeout_s=60.0,
    )
