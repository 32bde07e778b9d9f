"""A driver that uses every freedom of CSI passes: what it does is a warning or a note, and never a failure."""

from pathlib import Path

import pytest

from crust.conformance import suite
from crust.conformance.options import MIB, Options, Parameters
from tests.support.memory_csi.driver import serving
from tests.support.memory_csi.permissive import PermissiveDriver, SharedHost


@pytest.mark.timeout(180)
def test_permissive_driver_passes_with_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = PermissiveDriver()
    socket = tmp_path / "plugin" / "csi.sock"
    socket.parent.mkdir()
    small = Parameters(size_bytes=MIB)
    given = Options(socket=str(socket), target_root=tmp_path, parameters=small, timeout_s=20.0)
    with serving(driver, socket):
        outcome = suite.run(given, SharedHost(driver))
    assert not outcome.failed, capsys.readouterr().out
    assert outcome.exit_code == 0
    assert not driver.state.volumes
    assert not driver.state.targets
    assert {"C-005", "C-010", "C-114", "C-216"} <= outcome.warned
    assert {"C-105", "C-109", "C-123", "C-134"} <= outcome.noted
    assert {"C-112", "C-202", "C-213", "C-221", "C-252", "C-305"} <= outcome.passed
    assert outcome.skipped["C-214"] == "driver.block"
    assert outcome.skipped["C-206"] == "driver.checks-fs-type"
    assert "C-244" in outcome.passed, "that it speaks CSI 1.12 is seen"
