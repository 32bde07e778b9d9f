"""docs/operations.md, "Upgrade", where crust runs as pods: another build and the way back, as written."""

import re
from pathlib import Path

import pytest

from tests.support import environments
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.writers import Writers
from tests.support.pages import page_blocks

pytestmark = pytest.mark.timeout(1500)


def assert_serves(cluster: Cluster, version: str) -> None:
    """A command in the pod and the driver that it asks are of this version."""
    assert version in cluster.crust("--version")
    assert version in cluster.crust("drivers", "--output=wide")


def test_upgrade_and_way_back_leave_writers_alone(writers: Writers, tmp_path: Path) -> None:
    cluster = writers.cluster
    (upgrade,) = (each for each in page_blocks.blocks("operations.md") if "helm upgrade" in each)
    (way_back,) = re.findall(r"`(helm rollback [^`]+)`", page_blocks.text("operations.md"))
    assert_serves(cluster, environments.version())

    another = images.of_another_version(tmp_path / "another")
    cluster.follow(upgrade, another)
    assert_serves(cluster, another.tag)
    writers.assert_go_on()

    cluster.follow(way_back)
    cluster.rolled_out()
    assert_serves(cluster, environments.version())
    writers.assert_go_on()
