"""What the two projects say of themselves, and the exact versions of a node's Python packages, with their hashes."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.environments import CHECKOUT

LISTED = (CHECKOUT / "deploy/requirements.txt").read_text(encoding="utf-8")
PINS = {name.lower(): version for name, version in re.findall(r"^(\S+)==(\S+) \\$", LISTED, re.M)}
PROJECTS = {
    name: tomllib.loads((CHECKOUT / name).read_text(encoding="utf-8"))
    for name in ("pyproject.toml", "conformance/pyproject.toml")
}
PROJECT = PROJECTS["pyproject.toml"]["project"]
EXTRAS = ("kubernetes", "otel")


def test_list_has_what_the_project_and_its_packages_need() -> None:
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    for name in PINS:
        needed += importlib.metadata.requires(name) or []
    requirements = [Requirement(each) for each in needed]
    missing = {
        str(each)
        for each in requirements
        if each.marker is None or each.marker.evaluate({"extra": ""})
        if PINS.get(_canonical(each.name), "") not in each.specifier
    }
    assert missing == set()


def test_each_package_has_hashes_and_nothing_names_an_index() -> None:
    blocks = re.split(r"^(?=\S)", LISTED, flags=re.M)
    assert len([block for block in blocks if "--hash=sha256:" in block]) == len(PINS)
    assert not re.search(r"^--|https?:", LISTED, re.M)


@pytest.mark.parametrize("name", PROJECTS)
def test_build_requirements_are_exact_and_those_of_the_tests(name: str) -> None:
    """With all that they need: another version writes other bytes into a wheel."""
    listed = list(map(Requirement, PROJECTS[name]["build-system"]["requires"]))
    assert {str(each) for each in listed} <= set(
        PROJECTS["pyproject.toml"]["dependency-groups"]["dev"]
    )
    here = {each.name: f"=={importlib.metadata.version(each.name)}" for each in listed}
    assert {each.name: str(each.specifier) for each in listed} == here
    needed = {
        Requirement(text)
        for each in listed
        for text in importlib.metadata.requires(each.name) or []
    }
    left = {
        each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    assert left <= set(here)


@pytest.mark.parametrize("name", PROJECTS)
def test_project_is_not_for_an_index_and_names_its_proposals(name: str) -> None:
    """Nobody owns the names on an index. No address of the project is known, and an invented one is another's."""
    project = PROJECTS[name]["project"]
    assert "Private :: Do Not Upload" in project["classifiers"]
    assert [each for each in PROJECT["classifiers"] if "Python ::" in each] == [
        each for each in project["classifiers"] if "Python ::" in each
    ]
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert project["urls"] == PROJECT["urls"]
    assert [url for url in project["urls"].values() if f"({url})" not in readme] == []


def test_bill_of_materials_has_each_package_with_its_hashes(tmp_path: Path) -> None:
    wheel = tmp_path / "crust_csi-1.2.dev3-py3-none-any.whl"
    subprocess.run([sys.executable, CHECKOUT / "deploy/image/sbom.py", wheel], check=True)
    bill = json.loads(wheel.with_suffix(".cdx.json").read_text(encoding="utf-8"))
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/crust-csi@1.2.dev3"
    components = {each["name"]: each for each in bill["components"]}
    assert {name: each["version"] for name, each in components.items()} == PINS
    assert all(f"sha256:{h['content']}" in LISTED for e in components.values() for h in e["hashes"])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
