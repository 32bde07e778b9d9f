"""A unit test is found under the name of what it tests: tests/unit/<package>/test_<module>.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests" / "unit"
PACKAGES = {
    **{path.parent.name: path.parent for path in sorted((ROOT / "crust").glob("*/__init__.py"))},
    "benchmarks": ROOT / "benchmarks",
    "conformance": ROOT / "conformance" / "crust_conformance",
    "examples": ROOT / "examples",
}
STORIES = {
    "cli/gc/test_gc.py": "what one module forgets, another proves and a third collects",
    "conformance/test_mutants.py": "all cases of the suite against drivers with one fault each",
    "handoff/test_crashes.py": "writers and readers killed at each system call",
    "host/filesystems/test_every_filesystem.py": "compares the lists of many modules",
    "kubernetes_api/test_recorded_answers.py": "each reader with the same recorded cluster",
    "proxy/test_simulation.py": "the life of a node under a kubelet, while its processes die",
    "rpc/test_passthrough.py": "the bytes of a call through server, service and port",
}
"""Tests through several modules, which have a name of their own, and why no module owns them."""


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
