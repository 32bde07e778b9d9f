"""`crust cluster` without the settings of a controller says so, and not that a driver cannot start."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.cli.programs import daemons


@pytest.mark.parametrize("command", [("nodes",), ("retire", "node-1")])
def test_cluster_command_without_settings_asks_for_the_controllers(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "CONFIG_DIR", tmp_path)
    done = CliRunner().invoke(main, ["cluster", *command])
    assert done.exit_code == 2
    assert done.output.startswith("[NoClusterSettings] ")
    assert "--config" in done.output


def test_cluster_command_with_settings_of_a_local_driver_asks_for_the_controllers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "driver.toml"
    file.write_text('socket = "/run/crust/driver/csi.sock"\n')
    done = CliRunner().invoke(main, ["cluster", "nodes", "--config", str(file)])
    assert done.exit_code == 2
    assert done.output.startswith("[NoClusterSettings] ")
