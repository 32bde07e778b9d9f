"""The wheels of a commit: the same bytes at each build, and its version."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import environments


def made_wheels(origin: Path, tree: Path, umask: int) -> dict[str, bytes]:
    """What `make wheel` writes in a clone, by the build requirements of this environment: nothing is downloaded."""
    cloned = ("git", "clone", "--quiet", "--no-hardlinks", origin, tree)
    subprocess.run(cloned, check=True, umask=umask)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")
    }
    environment |= {
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_INDEX": "1",
    }  # pip reads the first as "no isolation"
    make = ("make", f"--old-file={sys.prefix}/.done", "wheel", f"VENV={sys.prefix}")
    subprocess.run(make, cwd=tree, umask=umask, env=environment, check=True)
    return {path.name: path.read_bytes() for path in (tree / "build").iterdir() if path.is_file()}


def test_two_builds_of_a_commit_have_the_same_bytes(tmp_path: Path) -> None:
    """In two directories, one of a user who lets nobody else read."""
    first = made_wheels(environments.CHECKOUT, tmp_path / "first", 0o022)
    second = made_wheels(tmp_path / "first", tmp_path / "second", 0o077)
    assert first.keys() == second.keys()
    assert [name for name, content in first.items() if content != second[name]] == []
    kinds = {re.sub(r"-.*-any", "", name) for name in first}
    assert kinds == {
        "crust_csi.whl",
        "crust_conformance.whl",
        "crust_csi.cdx.json",
        "requirements.txt",
    }


def test_tag_of_a_release_is_the_version_of_its_tree(tmp_path: Path) -> None:
    """And the chart's tag of the image."""
    chart = yaml.safe_load((environments.CHECKOUT / "deploy/helm/crust/Chart.yaml").read_text())
    tree = tmp_path / "tree"
    environments.do("git", "clone", "--quiet", "--no-hardlinks", environments.CHECKOUT, tree)
    environments.do("git", "-C", tree, "tag", f"v{chart['appVersion']}")
    asked = (sys.executable, "-m", "setuptools_scm", "--root", str(tree))
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    assert found == chart["appVersion"]
