"""crust's own driver passes the suite, in both profiles: alone, behind shim and proxy, in one process with them.

The driver, proxy and shim do the same in both profiles but for what a profile concerns: one complete run of each way
is enough, and in the other profile those cases. With TESTS_REPORTS, a directory, all eight runs are complete, and
each leaves a JUnit and a JSON report there (`make conformance`). A driver with two pools runs all in the second.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from crust.blockdriver.controller.class_parameters import POOL
from crust_conformance import catalogue, suite
from crust_conformance.options import MIB, Options, Parameters, Profile
from crust_conformance.results import Outcome, Results
from examples.drivers import cloud
from tests.support import capabilities
from tests.support.drivers import own_driver, vendor_driver
from tests.support.third_party import csi_sanity, ember

pytestmark = pytest.mark.root

SIZE_BYTES = 320 * MIB  # xfs cannot be smaller; the files are sparse
RAW_SIZE_BYTES = 64 * MIB
_JUDGED: tuple[Outcome, ...] = ("passed", "failed", "warning", "note")
# Cases that need a second node, a driver that expands volumes offline only, or one with inline ephemeral volumes.
_NOT_APPLICABLE = {"C-137", "C-165", "C-176", "C-227", "C-235"}
_DEFERRAL = {
    "C-501",
    "C-502",
    "C-503",
    "C-504",
    "C-505",
    "C-709",
}  # the proxy does not offer it to its caller
_OTHER_PROFILE: dict[Profile, set[str]] = {
    "1.12": {"C-145", "C-146", "C-158", "C-261", "C-262"},
    "1.13": {"C-138", "C-139", "C-244"},
}
# What a profile concerns; shim and proxy are told it in another way in each of these.
_PROFILE_IDS = {"C-003", "C-004", "C-005", "C-006"}.union(*_OTHER_PROFILE.values())
_ALONE: tuple[own_driver.Way, ...] = ("alone", "two-pools", "node-deployment")
# What external-attacher and external-resizer call, which have no node deployment.
_SIDECAR_IDS = {
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
def test_the_driver_conforms(short_dir: Path, profile: Profile, way: own_driver.Way) -> None:
    is_complete = "TESTS_REPORTS" in os.environ or profile in _COMPLETE[way]
    _check_conforms(short_dir, profile, way, set() if is_complete else _PROFILE_IDS | _DEFERRAL, {})


def test_driver_conforms_in_the_second_of_two_pools(short_dir: Path) -> None:
    _check_conforms(short_dir, "1.12", "two-pools", set(), IN_FURTHER_POOL)


IN_FURTHER_POOL = {POOL: own_driver.FURTHER_POOL}


def _check_conforms(
    short_dir: Path,
    profile: Profile,
    way: own_driver.Way,
    only: set[str],
    parameters: dict[str, str],
) -> None:
    with own_driver.serving(short_dir, profile, way) as driver:
        given = Parameters(
            parameters=parameters,
            # No limit, which every host keeps: the suite sees answers and not effects.
            mutable_parameters={"writeIOPS": "0", "readBytesPerSecond": "0"},
            size_bytes=SIZE_BYTES,
            raw_size_bytes=RAW_SIZE_BYTES,
            fs_types=("xfs", "ext4", "btrfs"),
        )
        outcome = suite.run_suite(
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
    skipped |= _SIDECAR_IDS if way == "node-deployment" else set()
    assert set(outcome.skipped) == (skipped & only if only else skipped)
    assert outcome.numbers("passed")


def _report(name: str) -> Path | None:
    if "TESTS_REPORTS" not in os.environ:
        return None
    directory = Path(os.environ["TESTS_REPORTS"]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


# One process has the same shims as three; that they are put together in the same way is seen with the strict driver.
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("cloud", ("processes", "node")),
        ("minimal", ("processes",)),
        ("stateful", ("processes",)),
        ("ember", ("node",)),
    ],
)
def test_wrapped_driver_conforms_as_it_does_alone(
    short_dir: Path, kind: str, ways: tuple[str, ...]
) -> None:
    if kind == "ember":
        capabilities.need("ember")
    alone, wrapped = short_dir / "alone", short_dir / "wrapped"
    without = _outcome(alone, kind, way="alone")
    for way in ways:
        with_wrap = _outcome(wrapped / way, kind, way=way)
        for outcome in _JUDGED:
            assert with_wrap.numbers(outcome) == without.numbers(outcome)
        assert set(with_wrap.skipped) == set(without.skipped)


_FAILS_SLOWLY = ("C-205", "C-306", "C-315")
"""Where Ember, alone too, repeats a failing umount for 37 s; the other drivers compare these cases."""


def _outcome(base: Path, kind: str, *, way: str) -> Results:
    base.mkdir(parents=True)
    root = base / "kubelet"
    root.mkdir()
    with ExitStack() as stack:
        driver = stack.enter_context(vendor_driver.running(kind, str(base)))
        socket = driver.socket
        if way != "alone":
            frontend = own_driver.wrapping(base, kind, driver.socket, as_node=way == "node")
            socket = stack.enter_context(frontend)
        given = Parameters(
            secrets={"token": cloud.TOKEN},
            size_bytes=ember.MIN_BYTES if kind == "ember" else 64 * MIB,
        )
        options = Options(
            socket=socket,
            target_root=root,
            profile="1.12",
            parameters=given,
            log=None,
            restart_command="",
            junit=base / "report.xml",
            skip=_FAILS_SLOWLY if kind == "ember" else (),
            timeout_s=60.0,
        )
        results = suite.run_suite(options)
        assert os.path.exists(base / "report.xml")
        return results


_NODE_CASES = ("C-2", "C-6")
"""The numbers of the cases of the node begin so."""
_NOT_IN_THE_WRAP = {
    "C-227",
    "C-235",
    "C-261",
    "C-262",
}  # of inline volumes, of several nodes, of CSI 1.13


def test_own_driver_without_its_deferral_conforms_behind_the_wrap(short_dir: Path) -> None:
    """The cases of the node: the rest passes the wrap as it passes any shim, which has a test of its own."""
    with own_driver.serving(short_dir, "1.12", "wrapped") as driver:
        given = Parameters(
            size_bytes=320 * MIB,  # an xfs grows without CAP_SYS_RESOURCE, and cannot be smaller
            raw_size_bytes=64 * MIB,
            fs_types=("xfs",),
        )
        options = Options(
            socket=str(driver.socket),
            target_root=driver.target_root,
            profile="1.12",
            parameters=given,
            only=tuple(case for case in catalogue.cases("C") if case.startswith(_NODE_CASES)),
            log=driver.log,
            restart_command=driver.restart_command,
            timeout_s=60.0,
        )
        outcome = suite.run_suite(options)
    assert not outcome.numbers("failed")
    assert len(outcome.numbers("passed")) > 40
    assert set(outcome.skipped) == _NOT_IN_THE_WRAP


CASES = 95
"""How many cases the pinned version has."""
SIZE = f"--csi.testvolumesize={64 << 20}"


@pytest.fixture(autouse=True)
def _is_built() -> None:
    capabilities.need("csi-sanity")


@pytest.mark.parametrize("way", ["alone", "two-pools", "behind-proxy"])
def test_own_driver_passes_every_case(short_dir: Path, way: own_driver.Way) -> None:
    with own_driver.serving(short_dir, "1.12", way) as driver:
        flags = csi_sanity.flags_of_page(short_dir / "mutable.yaml")
        if way == "two-pools":
            parameters = short_dir / "parameters.yaml"
            parameters.write_text(json.dumps(IN_FURTHER_POOL))  # which is YAML
            flags.append(f"--csi.testvolumeparameters={parameters}")
        outcome = csi_sanity.run(str(driver.socket), driver.target_root, *flags)
    assert (outcome.failed, outcome.skipped) == ({}, frozenset())
    assert len(outcome.passed) == CASES


@pytest.mark.parametrize("kind", ["cloud", "minimal", "stateful"])
def test_wrapped_driver_gets_what_it_gets_alone(short_dir: Path, kind: str) -> None:
    alone, wrapped = (_csi_sanity(short_dir / way, kind, way) for way in ("alone", "wrapped"))
    assert wrapped.passed == alone.passed
    assert wrapped.failed.keys() == alone.failed.keys()
    assert wrapped.skipped == alone.skipped
    assert len(alone.passed) > 20
    assert len(alone.passed) + len(alone.failed) + len(alone.skipped) == CASES


_WITH_SECRETS = (
    "CreateVolume", "DeleteVolume", "ControllerPublishVolume", "ControllerUnpublishVolume",
    "ControllerValidateVolumeCapabilities", "NodeStageVolume", "NodePublishVolume",
    "CreateSnapshot", "DeleteSnapshot", "ControllerExpandVolume", "ListSnapshots",
)  # fmt: skip


def _csi_sanity(base: Path, kind: str, way: str) -> csi_sanity.Outcome:
    root = base / "kubelet"
    root.mkdir(parents=True)
    secrets = base / "secrets.yaml"
    secrets.write_text(
        "".join(f"{secret}Secret:\n  token: {cloud.TOKEN}\n" for secret in _WITH_SECRETS)
    )
    with ExitStack() as stack:
        driver = stack.enter_context(vendor_driver.running(kind, str(base)))
        socket = driver.socket
        if way != "alone":
            socket = stack.enter_context(
                own_driver.wrapping(base, kind, driver.socket, as_node=False)
            )
        return csi_sanity.run(socket, root, f"--csi.secrets={secrets}", SIZE)
