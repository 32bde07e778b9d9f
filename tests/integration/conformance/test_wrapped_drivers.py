"""The suite through the wrap gives what it gives without it, for volumes that are not deferred."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from crust.conformance import catalogue, suite
from crust.conformance.options import MIB, Options, Parameters
from crust.conformance.results import Results
from examples.drivers import cloud
from tests.support import capabilities
from tests.support.drivers import own_driver, vendor_driver
from tests.support.drivers.wrapping_processes import wrapping
from tests.support.third_party import ember

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


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
    base: Path, kind: str, ways: tuple[str, ...]
) -> None:
    if kind == "ember":
        capabilities.need("ember")
    alone, wrapped = base / "alone", base / "wrapped"
    without = _outcome(alone, kind, way="alone")
    for way in ways:
        with_wrap = _outcome(wrapped / way, kind, way=way)
        assert with_wrap.passed == without.passed
        assert with_wrap.failed == without.failed
        assert (with_wrap.warned, with_wrap.noted) == (without.warned, without.noted)
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
            frontend = wrapping(base, kind, driver.socket, as_node=way == "node")
            socket = stack.enter_context(frontend)
        given = Parameters(
            secrets={"token": cloud.TOKEN},
            size_bytes=ember.MIN_BYTES if kind == "ember" else 64 * MIB,
            deferral=False,
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
        found = suite.run(options)
        assert os.path.exists(base / "report.xml")
        return found


_OF_THE_NODE = ("C-2", "C-6")
"""The numbers of the cases of the node begin so."""
_NOT_APPLICABLE = {
    "C-227",
    "C-235",
    "C-261",
    "C-262",
}  # of inline volumes, of several nodes, of CSI 1.13


def test_own_driver_without_its_deferral_conforms_behind_the_wrap(base: Path) -> None:
    """The cases of the node: the rest passes the wrap as it passes any shim, which has a test of its own."""
    with own_driver.serving(base, "1.12", "wrapped") as driver:
        given = Parameters(
            size_bytes=320 * MIB,  # an xfs grows without CAP_SYS_RESOURCE, and cannot be smaller
            raw_size_bytes=64 * MIB,
            fs_types=("xfs",),
            deferral=False,
        )
        options = Options(
            socket=str(driver.socket),
            target_root=driver.target_root,
            profile="1.12",
            parameters=given,
            only=tuple(each for each in catalogue.cases("C") if each.startswith(_OF_THE_NODE)),
            log=driver.log,
            restart_command=driver.restart_command,
            timeout_s=60.0,
        )
        outcome = suite.run(options)
    assert not outcome.failed
    assert len(outcome.passed) > 40
    assert set(outcome.skipped) == _NOT_APPLICABLE
