"""The suite through the wrap gives what it gives without it, for volumes that are not deferred."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crust.conformance import suite
from crust.conformance.options import MIB, Options, Parameters
from examples.drivers import cloud
from tests.support import vendor_driver
from tests.support.wrapping_processes import wrapping

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/tmp") as name:
        yield Path(name)


# One process has the same shims as three; that they are put together in the same way is seen with the strict driver.
@pytest.mark.parametrize(
    ("kind", "ways"), [("cloud", ("processes", "node")), ("minimal", ("processes",))]
)
def test_wrapped_driver_conforms_as_it_does_alone(
    base: Path, kind: str, ways: tuple[str, ...]
) -> None:
    alone, wrapped = base / "alone", base / "wrapped"
    without = _outcome(alone, kind, way="alone")
    for way in ways:
        with_wrap = _outcome(wrapped / way, kind, way=way)
        assert with_wrap.passed == without.passed
        assert with_wrap.failed == without.failed
        assert set(with_wrap.skipped) == set(without.skipped)


def _outcome(base: Path, kind: str, *, way: str) -> suite.Outcome:
    base.mkdir(parents=True)
    root = base / "kubelet"
    root.mkdir()
    with ExitStack() as stack:
        driver = stack.enter_context(vendor_driver.running(kind, str(base)))
        socket = driver.socket
        if way != "alone":
            front = wrapping(base, kind, driver.socket, as_node=way == "node")
            socket = stack.enter_context(front)
        given = Parameters(
            secrets={"token": cloud.TOKEN},
            size_bytes=64 * MIB,
            unknown_parameters_refused=kind == "cloud",
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
            timeout_s=60.0,
        )
        found = suite.run(options)
        assert os.path.exists(base / "report.xml")
        return found
