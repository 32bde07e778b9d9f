"""The wheel of a tree: the same bytes at each build, and the version of its commit."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.support import environments


def test_two_builds_of_a_tree_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    built = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            wheel = environments.build_wheel(Path(directory))
            built.append((wheel.name, wheel.read_bytes()))
    assert built[0] == built[1]
    assert built[0][0] == f"crust_csi-{environments.version()}-py3-none-any.whl"


def test_tag_of_a_release_is_the_version_of_its_tree(tmp_path: Path) -> None:
    """And the chart's tag of the image."""
    chart = yaml.safe_load((environments.CHECKOUT / "deploy/helm/crust/Chart.yaml").read_text())
    tree = tmp_path / "tree"
    environments.do("git", "clone", "--quiet", "--no-hardlinks", environments.CHECKOUT, tree)
    environments.do("git", "-C", tree, "tag", f"v{chart['appVersion']}")
    asked = (sys.executable, "-m", "setuptools_scm", "--root", str(tree))
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    assert found == chart["appVersion"]
