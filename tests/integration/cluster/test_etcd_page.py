"""docs/etcd.md: its commands make an etcd in which nodes are kept apart, and its settings connect to it."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.cli.doctor import etcd as checked
from crust.cli.doctor.finding import Level
from crust.cluster.etcd import connect
from crust.cluster.etcd.client import failures
from crust.settings.cluster import ClusterSettings
from examples.cluster import etcd as members
from tests.support.cluster.cluster_contract import announcement, eventually

PAGE = (Path(__file__).parents[3] / "docs" / "etcd.md").read_text(encoding="utf-8")


def blocks(language: str, heading: str) -> list[str]:
    """The blocks of code below a heading."""
    _, _, section = PAGE.partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


class Site:
    """A directory with what the page makes, at ports of this machine instead of the page's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client, self.peer = members.free_ports(2, "127.0.0.1", self)

    def here(self, text: str) -> str:
        """The page's text with this machine's addresses and directories."""
        for old, new in (
            ("192.0.2.1:2379", f"127.0.0.1:{self.client}"),
            ("192.0.2.1:2380", f"127.0.0.1:{self.peer}"),
            ("192.0.2.1", "127.0.0.1"),
            ("/var/lib/etcd", str(self.directory / "data")),
            ("/etc/etcd", str(self.directory)),
            ("/etc/crust/etcd", str(self.directory)),
        ):
            text = text.replace(old, new)
        return text

    def run(self, script: str) -> str:
        """Run a block; it must succeed as a whole."""
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", self.here(script)],
            cwd=self.directory, env={"PATH": os.environ["PATH"]},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def settings(self, user: str) -> ClusterSettings:
        """The page's settings, with the certificate of `user`."""
        (text,) = blocks("toml", "Settings")
        table = tomllib.loads(self.here(text).replace("node-a", user))["cluster"]
        return ClusterSettings.model_validate(table)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All that the page makes, in its order."""
    made = Site(tmp_path_factory.mktemp("page"))
    (certificates,) = blocks("sh", "Certificates")
    made.run(certificates + "issue node-b extendedKeyUsage=clientAuth\n")
    (environment,) = blocks("ini", "Start etcd")
    lines = made.here(environment).splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    with members.process([], made.directory / "etcd.log", variables):
        (users,) = blocks("sh", "Users and roles")
        made.run(
            users.replace(
                "etcdctl auth enable", "grant node-b /crust/nodes/node-b/\netcdctl auth enable"
            )
        )
        yield made


async def test_nodes_and_controller_of_the_page_connect(site: Site) -> None:
    async with (
        connect.node_side(site.settings("node-a"), "node-a") as node,
        connect.controller_side(site.settings("controller")) as controller,
    ):
        await node.announce(announcement("node-a"))
        await eventually(lambda: "node-a" in controller.nodes())


async def test_node_of_the_page_cannot_speak_for_another_one(site: Site) -> None:
    async with connect.node_side(site.settings("node-b"), "node-a") as node:
        with pytest.raises(failures.StoreAccessDenied):
            await node.announce(announcement("node-a"))


def test_doctor_finds_nothing_wrong_with_the_page(site: Site) -> None:
    for user, is_node in (("node-a", True), ("controller", False)):
        said = checked.findings(site.settings(user), "node-a", is_node=is_node)
        assert [each.what for each in said if each.level is Level.ERROR] == []


def test_keys_of_the_page_are_readable_by_nobody_else(site: Site) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in site.directory.glob("*.key")}
    assert set(modes.values()) == {0o600}
    assert {"ca.key", "root.key", "controller.key", "node-a.key", "etcd-1.key"} <= set(modes)


def test_commands_for_a_full_store_succeed(site: Site) -> None:
    (users,) = blocks("sh", "Users and roles")
    exports = "\n".join(line for line in users.splitlines() if line.startswith("export"))
    (commands,) = blocks("sh", "The store is full")
    site.run(f"{exports}\n{commands}")
