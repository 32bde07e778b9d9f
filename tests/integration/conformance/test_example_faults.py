"""Each fault in an example driver is seen by the case of its clause, and the driver without it passes that case."""

from pathlib import Path

import pytest

from crust_conformance import suite
from crust_conformance.options import MIB, Options, Parameters
from crust_conformance.results import Results
from examples.drivers import cloud
from tests.support.drivers import vendor_driver
from tests.support.mutants import example_faults
from tests.support.mutants.example_faults import Fault

pytestmark = pytest.mark.root


def _outcome(base: Path, kind: str, *only: str, code: Path) -> Results:
    root = base / "kubelet"
    root.mkdir()
    with vendor_driver.running(kind, str(base), code) as driver:
        # the driver as clouds have them stacks raw devices, and refuses to publish one read-only
        block = False if kind == "cloud" else None
        given = Parameters(secrets={"token": cloud.TOKEN}, size_bytes=64 * MIB, block=block)
        options = Options(
            socket=driver.socket, target_root=root, profile="1.12", parameters=given, only=only
        )
        return suite.run_suite(options)


@pytest.mark.parametrize("kind", sorted({fault.kind for fault in example_faults.ALL}))
def test_driver_without_the_faults_passes_their_cases(short_dir: Path, kind: str) -> None:
    cases = {fault.case for fault in example_faults.ALL if fault.kind == kind}
    code = example_faults.copy_drivers(short_dir / "code")
    assert _outcome(short_dir, kind, *cases, code=code).numbers("passed") == cases


@pytest.mark.parametrize(
    "fault", example_faults.ALL, ids=lambda fault: f"{fault.case}-{fault.kind}"
)
def test_fault_is_seen_by_the_case_of_its_clause(short_dir: Path, fault: Fault) -> None:
    code = example_faults.copy_drivers(short_dir / "code")
    fault.put_into(code)
    assert _outcome(short_dir, fault.kind, fault.case, code=code).numbers("failed") == {fault.case}
