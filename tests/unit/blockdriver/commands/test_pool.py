"""`crust driver init-pool`: the pool that the settings name."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crust.cli.main import main
from crust.cli.programs import daemons

OTHER = """
[[proxy.drivers]]
name = "csi.example.com"
socket = "/run/co.sock"
backend = "/run/crust/shim/csi.sock"
[shim]
driver_socket = "/run/inner.sock"
"""


def init_pool(tmp_path: Path, toml: str, *flags: str) -> Result:
    config = tmp_path / "settings.toml"
    config.write_text(toml)
    return CliRunner().invoke(main, ["driver", "init-pool", f"--config={config}", *flags])


def test_init_pool_reads_the_driver_table_of_node_settings(tmp_path: Path) -> None:
    at = f'state_dir = "{tmp_path}/pool"\npool_id_file = "{tmp_path}/id"\n'
    made = init_pool(tmp_path, f"[driver]\n{at}")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "pool" / "pool.json").exists()
    assert (tmp_path / "id").exists()
    again = init_pool(tmp_path, at)
    assert again.output == made.output


def test_init_pool_flags_are_stronger_than_the_driver_table(tmp_path: Path) -> None:
    toml = f'[driver]\nstate_dir = "{tmp_path}/pool"\n'
    made = init_pool(tmp_path, toml, f"--state-dir={tmp_path}/other")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "other" / "pool.json").exists()
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (OTHER, "0 drivers that have a pool of the node, and one is needed"),
        ('[driver]\nstate_dri = "/x"\n', "driver.state_dri is no setting; did you mean state_dir?"),
        ('[proxy]\ndrivers = 3\n[driver]\nstate_dir = "/x"\n', "proxy.drivers must be a list"),
        ('driver = "own"\n', "driver must be a list"),
        ("[driver\n", "the settings file is not TOML"),
    ],
)
def test_settings_that_name_no_pool_are_refused(tmp_path: Path, toml: str, sentence: str) -> None:
    refused = init_pool(tmp_path, toml)
    assert refused.exit_code == 2
    assert sentence in refused.output


def test_init_pool_reads_the_node_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "CONFIG_DIR", tmp_path)
    (tmp_path / "node.toml").write_text(f'[driver]\nstate_dir = "{tmp_path}/pool"\n')
    made = CliRunner().invoke(main, ["driver", "init-pool"])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "pool" / "pool.json").exists()


def test_init_pool_makes_further_pool_by_its_name(tmp_path: Path) -> None:
    toml = f'''
state_dir = "{tmp_path}/pool"
[pools.fast]
state_dir = "{tmp_path}/fast"
pool_id_file = "{tmp_path}/fast.id"
'''
    made = init_pool(tmp_path, toml, "--pool=fast")
    assert made.exit_code == 0, made.output
    assert made.output == (tmp_path / "fast.id").read_text()
    assert not (tmp_path / "pool").exists()
    refused = init_pool(tmp_path, toml, "--pool=slow")
    assert refused.exit_code == 2
    assert "no pool slow, but default, fast" in refused.output


def test_init_pool_of_two_drivers_takes_the_nodes_pool(tmp_path: Path) -> None:
    shared = """
[[driver]]
mode = "node"
engine = "rbd"
driver_name = "rbd.csi.crust.dev"
run_dir = "/run/crust/driver-rbd"
[driver.rbd]
monitors = "v2:192.0.2.1:3300"
pool = "kubernetes"
"""
    made = init_pool(tmp_path, f'{shared}[[driver]]\nstate_dir = "{tmp_path}/pool"\n')
    assert made.exit_code == 0, made.output
    assert (tmp_path / "pool" / "pool.json").exists()


def test_init_pool_of_two_local_drivers_is_told_which(tmp_path: Path) -> None:
    first, second = f"{tmp_path}/first", f"{tmp_path}/second"
    toml = f"""
[[driver]]
state_dir = "{first}"
[[driver]]
driver_name = "fast.csi.crust.dev"
run_dir = "/run/crust/fast"
state_dir = "{second}"
pool_id_file = "{tmp_path}/id"
"""
    for flags in ((), (f"--state-dir={tmp_path}/third",)):
        refused = init_pool(tmp_path, toml, *flags)
        assert refused.exit_code == 2
        assert "2 drivers that have a pool of the node, and one is needed" in refused.output
        assert f"for block.csi.crust.dev give --state-dir={first}" in refused.output
        assert f"for fast.csi.crust.dev give --state-dir={second}" in refused.output
    made = init_pool(tmp_path, toml, f"--state-dir={second}")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "second" / "pool.json").exists()
    assert made.output == (tmp_path / "id").read_text()
