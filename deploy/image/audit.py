"""Says whether a package of a bill of materials has a fault that is known and mended: a release has none.

Of a Python package pip-audit asks the index, whose answer names each fault and the versions without it. Where the
index has no such data, as a mirror, and for Debian's packages, the version answers: it must be the newest that the
index, or the package lists of this machine, have within the project's bounds. A question without an answer is a
failure, and never "no fault".

    python audit.py BILL…        with a Python that has pip-audit; ends with 1 if a package is named
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_EXTRAS = ("kubernetes", "otel")
"""As the target `requirements` has them."""
_CANDIDATE = re.compile(r"^(\S+):\n(?:  .*\n)*?  Candidate: (\S+)$", re.M)

Versions = Mapping[str, str]
"""By the names of packages."""


def main() -> None:
    """The command."""
    found: set[str] = set()
    for path in map(Path, sys.argv[1:]):
        components = json.loads(path.read_text(encoding="utf-8"))["components"]
        python, debian = (dict(_packages(components, kind)) for kind in ("pypi", "deb"))
        count = len(found)
        found.update(_python(python))
        found.update(_older(debian, _newest_debian(debian), "this machine's package lists have"))
        of_kinds = f"{len(python)} packages of Python and {len(debian)} of Debian"
        sys.stdout.write(f"{path.name}: {of_kinds}, {len(found) - count} to look at\n")
    sys.stdout.writelines(f"{line}\n" for line in sorted(found))
    if found or not sys.argv[1:]:
        sys.exit(1)


def _packages(components: list[dict[str, Any]], kind: str) -> Iterator[tuple[str, str]]:
    for component in components:
        if component["purl"].startswith(f"pkg:{kind}/"):
            yield component["name"], component["version"]


def _python(packages: Versions) -> Iterator[str]:
    unknown = dict(packages)
    for told in _told_of_faults(packages):
        if "skip_reason" in told:
            continue
        unknown.pop(told["name"])
        for fault in told["vulns"]:
            if mended := fault["fix_versions"]:
                why = f"{fault['id']}, mended in {' or '.join(mended)}"
                yield f"{told['name']} {told['version']}: {why}"
    if unknown:
        sys.stdout.write(f"no data of faults for {len(unknown)}: judged by version\n")
        yield from _older(unknown, _newest_python(), "the index has")


def _older(packages: Versions, newest: Versions, where: str) -> Iterator[str]:
    for name, version in packages.items():
        known = newest.get(name)
        if known is None:
            yield f"{name} {version}: {where} no version of it within the project's bounds"
        elif known != version:
            yield f"{name} {version}: {where} {known}"


def _told_of_faults(packages: Versions) -> list[dict[str, Any]]:
    listed = "".join(f"{name}=={version}\n" for name, version in packages.items())
    given = ("--requirement=/dev/stdin", "--no-deps", "--disable-pip", "--format=json")
    done = _run(sys.executable, "-m", "pip_audit", "--progress-spinner=off", *given, given=listed)
    if done.returncode not in (0, 1) or not done.stdout:  # 1: there are faults
        sys.exit(f"pip-audit: {done.stderr}")
    told: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    if {each["name"] for each in told} != set(packages):
        sys.exit("pip-audit answers about other packages than it was asked about")
    return told


def _newest_python() -> Versions:
    """What pip would choose today."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounds = [*project["dependencies"], *(each for name in _EXTRAS for each in extras[name])]
    resolve = ("install", "--dry-run", "--ignore-installed", "--quiet", "--report=-", *bounds)
    done = _run(sys.executable, "-m", "pip", *resolve)
    if done.returncode:
        sys.exit(f"pip: {done.stderr}")
    chosen = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in chosen}


def _newest_debian(packages: Versions) -> Versions:
    if not packages:
        return {}
    done = _run("apt-cache", "policy", *packages)
    if done.returncode:
        sys.exit(f"apt-cache: {done.stderr}")
    return dict(_CANDIDATE.findall(done.stdout))


def _run(*command: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
