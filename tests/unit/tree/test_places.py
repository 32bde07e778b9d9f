"""A unit test is found under the name of what it tests: tests/unit/<package>/test_<module>.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests" / "unit"
PACKAGES = {
    **{
        name: ROOT / "crust" / name
        for name in (
            "blockdriver/commands", "blockdriver/host", "cli", "core", "handoff", "host",
            "inspection", "kata", "kubernetes_api", "rpc",
        )
    },
    "conformance": ROOT / "conformance" / "crust_conformance",
}  # fmt: skip
STORIES = {
    "cli/gc/test_gc.py",
    "cli/manifest/test_manifest.py",
    "cli/manifest/test_manifest_of_roles.py",
    "conformance/test_mutants.py",
    "handoff/test_crashes.py",
    "host/filesystems/test_every_filesystem.py",
    "kubernetes_api/test_recorded_answers.py",
    "rpc/test_passthrough.py",
}
"""Tests through several modules, which have a name of their own."""


@pytest.mark.parametrize("package", PACKAGES)
def test_file_of_tests_has_the_name_of_its_module(package: str) -> None:
    unnamed = set()
    for file in (UNIT / package).rglob("test_*.py"):
        folder = PACKAGES[package] / file.parent.relative_to(UNIT / package)
        modules = {path.stem for path in folder.glob("[a-z]*")}
        subject = file.stem.removeprefix("test_")
        if not any(subject == name or subject.startswith(f"{name}_") for name in modules):
            unnamed.add(str(file.relative_to(UNIT)))
    assert unnamed == {story for story in STORIES if story.startswith(f"{package}/")}
