"""deploy/image/audit.py: a known fault, an old version and a question without an answer end it with 1.

The index and the package lists are stand-ins: modules and a program that the test puts before the real ones. Their
answers have the forms of pip-audit 2.10, pip 25 and apt 2.6.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.environments import CHECKOUT

PYTHON, DEBIAN = {"h11": "0.16.0", "idna": "3.20"}, {"libc6": "2.36-9+deb12u14"}
POLICY = """libc6:
  Installed: (none)
  Candidate: {version}
  Version table:
     {version} 500
        500 http://deb.example bookworm/main amd64 Packages
"""


def answer(script: str) -> str:
    """A program in Python."""
    return f"import sys\n{script}\n"


def told(**of_package: Any) -> str:
    """pip-audit's answer; by default no package has a fault."""
    listed = [
        {"name": name, "version": version, "vulns": [], **of_package.get(name, {})}
        for name, version in PYTHON.items()
    ]
    for each in listed:
        if "skip_reason" in each:
            del each["version"], each["vulns"]
    return answer(f"print({json.dumps(json.dumps({'dependencies': listed, 'fixes': []}))})")


def fault(*mended: str) -> dict[str, Any]:
    return {"vulns": [{"id": "PYSEC-1", "fix_versions": [*mended], "aliases": []}]}


def audit(
    directory: Path, told_of_faults: str, *, newest: dict[str, str] | None = None, policy: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run it on a bill of these packages."""
    chosen = {
        "install": [{"metadata": {"name": n, "version": v}} for n, v in (newest or {}).items()]
    }
    for name, script in (
        ("pip_audit", told_of_faults),
        ("pip", answer(f"print({json.dumps(json.dumps(chosen))})") if newest else "exit(7)"),
    ):
        (directory / name).mkdir()
        (directory / name / "__init__.py").touch()
        (directory / name / "__main__.py").write_text(script)
    program = directory / "apt-cache"
    text = policy or POLICY.format(version=DEBIAN["libc6"])
    program.write_text(f"#!/bin/sh\ncat <<'.'\n{text}.\n")
    program.chmod(0o755)
    components = [
        {"name": name, "version": version, "purl": f"pkg:{kind}/{name}@{version}"}
        for kind, packages in (("pypi", PYTHON), ("deb", DEBIAN))
        for name, version in packages.items()
    ]
    bill = directory / "image.cdx.json"
    bill.write_text(json.dumps({"components": components}))
    path = f"{directory}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, CHECKOUT / "deploy/image/audit.py", bill],
        env={**os.environ, "PYTHONPATH": str(directory), "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_packages_without_known_faults_pass(tmp_path: Path) -> None:
    done = audit(tmp_path, told())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "image.cdx.json: 2 packages of Python and 1 of Debian, 0 to look at\n"


def test_known_and_mended_fault_is_named_with_its_remedy(tmp_path: Path) -> None:
    done = audit(tmp_path, told(h11=fault("0.16.1", "0.17")))
    assert done.returncode == 1
    assert "h11 0.16.0: PYSEC-1, mended in 0.16.1 or 0.17\n" in done.stdout


def test_fault_that_nobody_has_mended_passes(tmp_path: Path) -> None:
    assert audit(tmp_path, told(h11=fault())).returncode == 0


def test_package_without_data_of_faults_must_be_newest(tmp_path: Path) -> None:
    unserved = told(idna={"skip_reason": "Dependency not found on PyPI"})
    (tmp_path / "old").mkdir()
    old = audit(tmp_path / "old", unserved, newest={"idna": "3.21", "h11": "0.99"})
    assert old.returncode == 1
    assert old.stdout.splitlines()[2:] == ["idna 3.20: the index has 3.21"]
    (tmp_path / "new").mkdir()
    assert audit(tmp_path / "new", unserved, newest={"idna": "3.20"}).returncode == 0


def test_debian_package_older_than_package_lists_is_named(tmp_path: Path) -> None:
    done = audit(tmp_path, told(), policy=POLICY.format(version="2.36-9+deb12u15"))
    assert done.returncode == 1
    assert "libc6 2.36-9+deb12u14: this machine's package lists have 2.36-9+deb12u15" in done.stdout


def test_question_without_an_answer_fails(tmp_path: Path) -> None:
    for number, (faults, policy) in enumerate(
        {
            ("print('{}'); exit(3)", ""),  # pip-audit fails
            (answer("print('{\"dependencies\": []}')"), ""),  # it answers about nothing
            (told(idna={"skip_reason": "not found"}), ""),  # pip fails
            (told(), "N: Unable to locate package libc6\n"),
        }
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert audit(directory, faults, policy=policy).returncode == 1
    nothing = [sys.executable, str(CHECKOUT / "deploy/image/audit.py")]
    assert subprocess.run(nothing, check=False).returncode == 1
