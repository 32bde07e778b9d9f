"""What a version would not read of a node is named before it starts there."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.blockdriver.engines.files import pool
from crust.blockdriver.records import node_state
from crust.cli import layouts
from crust.cli.main import main
from crust.cli.programs import daemons
from crust.core.settings.program import ProgramSettings
from crust.handoff import mount_info_models
from crust.handoff.store import Store
from crust.host.process import syscalls
from tests.support.records.records import a_record


def text(root: Path) -> str:
    """The file of a node whose directories are below `root`."""
    return f"""
proxy.run_dir = "{root}/run"
proxy.volumes_root = "{root}/run/volumes"
[[driver]]
state_dir = "{root}/block"
run_dir = "{root}/run/driver"
"""


@pytest.fixture
def node(tmp_path: Path) -> ProgramSettings:
    return daemons.load("node", text(tmp_path))


@pytest.mark.parametrize("raised", [0, 1])
def test_entry_of_a_newer_schema_is_named(
    tmp_path: Path, node: ProgramSettings, raised: int
) -> None:
    (tmp_path / "run").mkdir()
    store = Store(f"{tmp_path}/run/volumes")
    store.open()
    record = Path(store.layout.entry(store.create(a_record()).require().target).record)
    stored = json.loads(record.read_text())
    stored["crust"]["schema"] += raised
    record.write_text(json.dumps(stored))
    why = f"its schema is {mount_info_models.SCHEMA + 1},"
    assert [why in each for each in layouts.unread(node)] == [True] * raised


@pytest.mark.parametrize("raised", [0, 1])
def test_node_state_of_another_schema_is_named(
    tmp_path: Path, node: ProgramSettings, raised: int
) -> None:
    path = tmp_path / "run/driver" / syscalls.boot_id() / "v-1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": node_state.SCHEMA + raised}))
    path.with_name("v-2.json").write_text("no JSON: this version refuses it too")
    named = [
        f"v-1: it has schema {node_state.SCHEMA + 1}," in each for each in layouts.unread(node)
    ]
    assert named == [True] * raised


@pytest.mark.parametrize("unseen", ["run/volumes", "block/pool.json"])
def test_what_is_not_seen_is_refused_beside_the_settings(tmp_path: Path, unseen: str) -> None:
    """No answer of the kernel (ELOOP) is never "nothing is there"."""
    (tmp_path / unseen).parent.mkdir()
    (tmp_path / unseen).symlink_to(tmp_path / unseen)
    path = tmp_path / "node.toml"
    path.write_text(text(tmp_path))
    ran = CliRunner().invoke(main, ["config", "check", "node", f"--config={path}"])
    assert ran.exit_code == 1
    assert "ELOOP" in ran.output
    assert "proxy.volumes_root" in ran.output


def test_check_of_settings_names_the_pool_and_changes_nothing(tmp_path: Path) -> None:
    """As an operator asks a new image before a rollout."""
    path = tmp_path / "node.toml"
    path.write_text(text(tmp_path))
    words = ["config", "check", "node", f"--config={path}"]
    assert CliRunner().invoke(main, words).exit_code == 0
    (tmp_path / "block").mkdir()
    identity = {"schema": pool.SCHEMA + 1, "pool_id": "0123456789abcdef", "created": ""}
    (tmp_path / "block/pool.json").write_text(json.dumps(identity))
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 1
    assert f"it has schema {pool.SCHEMA + 1}," in ran.output
    assert {each.name for each in tmp_path.iterdir()} == {"block", "node.toml"}
    assert [each.name for each in (tmp_path / "block").iterdir()] == ["pool.json"]
