"""`crust cluster`: what it lists, and that it asks for the settings of a controller if there are none."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.cli.programs import cluster_nodes, daemons
from crust.cluster.protocol import Announcement


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


class Store:
    """A cluster of one node, another that is away, and a retired pool."""

    def nodes(self) -> dict[str, Announcement]:
        said = Announcement(
            "n1", "p1", {"zone": "a"}, 5 << 20, 9 << 20, 3, 0, is_ready=True, boot="boot"
        )  # fmt: skip
        return {"n1": said}

    def known_pools(self) -> dict[str, str]:
        return {"p2": "n2", "p1": "n1"}

    def retired_pools(self) -> frozenset[str]:
        return frozenset({"p3"})


def test_cluster_nodes_are_listed_in_every_format() -> None:
    shown = cluster_nodes.shown(Store())
    ready, away = json.loads(shown.rendered("json").plain)["nodes"][1:]
    assert ready == {
        "node": "n1", "pool": "p1", "state": "ready", "free_bytes": 5 << 20, "published": 3,
        "segments": {"zone": "a"},
    }  # fmt: skip
    assert (away["state"], away["free_bytes"], away["published"]) == ("absent", None, None)
    assert shown.rendered("name").plain.splitlines() == ["p3", "n1", "n2"]
    assert [line.split() for line in shown.rendered("table").plain.splitlines()] == [
        ["NODE", "POOL", "STATE", "FREE", "MIB", "VOLUMES"],
        ["-", "p3", "retired", "-", "-"],
        ["n1", "p1", "ready", "5", "3"],
        ["n2", "p2", "absent", "-", "-"],
    ]
    assert "zone=a" in shown.rendered("wide").plain
