"""Environments that hold wheels of this checkout and what they declare, and nothing else; nothing is downloaded.

A dependency is linked from the environment that runs the tests, file by file, because several share the directory
`google`.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def build_wheel(into: Path, project: str = ".", *, named: str = "", commit: str = "") -> Path:
    """Build the wheel of a project of this checkout, or of an earlier commit, into a directory that has none.

    `named`: the version, if it is not the checkout's own.
    """
    own_version = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": named or version()}
    with tempfile.TemporaryDirectory() as built:  # setuptools writes beside the sources
        source = Path(built, "source")
        if commit:
            source.mkdir()
            do("git", "-C", CHECKOUT, "archive", "--output", f"{built}/source.tar", commit)
            do("tar", "--extract", "--file", f"{built}/source.tar", "--directory", source)
        else:
            leave = shutil.ignore_patterns(".*", "build", "tests")
            shutil.copytree(CHECKOUT, source, ignore=leave)
        here = ("--no-deps", "--no-build-isolation")
        do(*_PIP, "wheel", *here, "--wheel-dir", str(into), f"{source}/{project}", env=own_version)
    (wheel,) = into.glob("*.whl")
    return wheel


def version() -> str:
    """The version of this checkout."""
    return do(sys.executable, "-m", "setuptools_scm", "--root", str(CHECKOUT)).strip()


def extras(wheel: Path) -> tuple[str, ...]:
    """The names of the extras that a wheel declares."""
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    return tuple(distribution.metadata.get_all("Provides-Extra") or ())


def make(directory: Path, *wheels: Path, wanted: tuple[str, ...] = ()) -> Path:
    """An environment with these wheels and extras; returns its `python`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    do(*_PIP, "--python", str(python), "install", "--no-deps", "--no-compile", *map(str, wheels))
    (packages,) = directory.glob("lib/python3*/site-packages")
    own = list(importlib.metadata.distributions(path=list(map(str, wheels))))
    requires = [requirement for wheel in own for requirement in wheel.requires or ()]
    for name in sorted(_closure(requires, frozenset(wanted), set())):
        if name not in {wheel.name for wheel in own}:
            _link(name, packages)
    return python


def _closure(requires: list[str], wanted: frozenset[str], known: set[str]) -> set[str]:
    for requirement in map(Requirement, requires):
        marker = requirement.marker
        if marker is not None and not any(
            marker.evaluate({"extra": extra}) for extra in (*wanted, "")
        ):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in known or requirement.extras:
            known.add(name)
            _closure(importlib.metadata.requires(name) or [], frozenset(requirement.extras), known)
    return known


def _link(name: str, packages: Path) -> None:
    distribution = importlib.metadata.distribution(name)
    for file in _files(distribution):
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(str(distribution.locate_file(file)))


def _files(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Of the package itself: no scripts, no compiled files."""
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            yield str(file)


def do(*command: object, env: Mapping[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
