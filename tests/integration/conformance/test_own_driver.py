"""crust's own driver passes the suite, in both profiles: alone, behind shim and proxy, in one process with them.

The driver, proxy and shim do the same in both profiles but for what a profile concerns: one complete run of each way
is enough, and in the other profile those cases. With TESTS_REPORTS, a directory, all eight runs are complete, and
each leaves a JUnit and a JSON report there (`make conformance`).
"""

import os
from pathlib import Path

import pytest

from crust.conformance import suite
from crust.conformance.options import MIB, Options, Parameters, Profile
from tests.support.drivers import own_driver

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

SIZE_BYTES = 320 * MIB  # xfs cannot be smaller; the files are sparse
RAW_SIZE_BYTES = 64 * MIB
# Cases that need a second node, a driver that expands volumes offline only, or one with inline ephemeral volumes.
_NOT_APPLICABLE = {"C-137", "C-165", "C-176", "C-227", "C-235"}
_DEFERRAL = {"C-501", "C-502", "C-503"}  # the proxy does not offer it to its caller
_OTHER_PROFILE: dict[Profile, set[str]] = {
    "1.12": {"C-145", "C-146", "C-158", "C-261", "C-262"},
    "1.13": {"C-244"},
}
# What a profile concerns; shim and proxy are told it in another way in each of these.
_OF_PROFILE = {"C-003", "C-004", "C-005", "C-006"}.union(*_OTHER_PROFILE.values())
_ALONE: tuple[own_driver.Way, ...] = ("alone", "node-deployment")
# What external-attacher and external-resizer call, which have no node deployment.
_OF_SIDECARS = {
    *(
        f"C-{number:03d}"
        for number in (*range(11, 15), 16, 17, 135, *range(161, 165), 166, 167, 168)
    ),
    *(f"C-{number}" for number in (*range(171, 176), *range(181, 188), *range(252, 255))),
    *("C-406", "C-410", "C-411", "C-414", "C-416", "C-706"),
}
_COMPLETE: dict[own_driver.Way, set[Profile]] = {
    "alone": {"1.12"},
    "node-deployment": {"1.12"},
    "behind-proxy": {"1.13"},
    "node": {"1.12"},
}


@pytest.mark.parametrize("profile", ["1.12", "1.13"])
@pytest.mark.parametrize("way", ["alone", "node-deployment", "behind-proxy", "node"])
def test_the_driver_conforms(base: Path, profile: Profile, way: own_driver.Way) -> None:
    only = set() if _is_complete(profile, way) else _OF_PROFILE | _DEFERRAL
    with own_driver.serving(base, profile, way) as driver:
        given = Parameters(
            # No limit, which every host keeps: the suite sees answers and not effects.
            mutable_parameters={"writeIOPS": "0", "readBytesPerSecond": "0"},
            size_bytes=SIZE_BYTES,
            raw_size_bytes=RAW_SIZE_BYTES,
            fs_types=("xfs", "ext4", "btrfs"),
            deferral=way in _ALONE,
        )
        outcome = suite.run(
            Options(
                socket=str(driver.socket),
                target_root=driver.target_root,
                profile=profile,
                parameters=given,
                log=driver.log,
                restart_command=driver.restart_command,
                only=tuple(sorted(only)),
                junit=_report(f"csi-{profile}-{way}.xml"),
                json=_report(f"csi-{profile}-{way}.json"),
                strict=True,
                timeout_s=60.0,
            )
        )
        assert outcome.numbers("failed", "warning", "note") == frozenset()
        assert outcome.exit_code == 0
    skipped = _NOT_APPLICABLE | _OTHER_PROFILE[profile]
    skipped |= set() if way in _ALONE else _DEFERRAL
    skipped |= _OF_SIDECARS if way == "node-deployment" else set()
    assert set(outcome.skipped) == (skipped & only if only else skipped)
    assert outcome.passed


def _is_complete(profile: Profile, way: own_driver.Way) -> bool:
    return "TESTS_REPORTS" in os.environ or profile in _COMPLETE[way]


def _report(name: str) -> Path | None:
    if "TESTS_REPORTS" not in os.environ:
        return None
    directory = Path(os.environ["TESTS_REPORTS"]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name
