"""Writes the bill of materials of a build (CycloneDX 1.6, JSON): the Python packages, and an image's Debian packages.

Python packages are those of requirements.txt, with the hashes that pip accepts; Debian packages those of the image's
own list. For one build and one SOURCE_DATE_EPOCH the bytes are the same.

    sbom.py WHEEL        writes <wheel>.cdx.json
"""

import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})+)", re.M)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


def write(
    path: Path, version: str, *, epoch_s: int, debian: Iterable[tuple[str, str, str]] = ()
) -> None:
    """Write the bill of `version`, built at `epoch_s` (Unix time); `debian` are as `debian_packages` gives them."""
    crust = _component("crust-csi", version, ComponentType.APPLICATION, "pypi")
    bom = Bom(
        components=[*_python(REQUIREMENTS.read_text(encoding="utf-8")), *map(_of_debian, debian)],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{path.name} {version} {epoch_s}"),
    )
    bom.metadata.component = crust
    bom.metadata.timestamp = datetime.fromtimestamp(epoch_s, UTC)
    bom.register_dependency(crust, bom.components)
    path.write_text(f"{JsonV1Dot6(bom).output_as_string(indent=1)}\n", encoding="utf-8")


def debian_packages(status: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and architecture of each package that dpkg's status file lists as installed (deb-control(5))."""
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.M))
        if fields.get("Status", "").endswith(" installed"):
            yield fields["Package"], fields["Version"], fields["Architecture"]


def _python(requirements: str) -> Iterator[Component]:
    for name, version, hashes in _PINNED.findall(requirements):
        yield _component(name, version, ComponentType.LIBRARY, "pypi", hashes=_HASH.findall(hashes))


def _of_debian(package: tuple[str, str, str]) -> Component:
    name, version, architecture = package
    return _component(
        name, version, ComponentType.LIBRARY, "deb", namespace="debian", arch=architecture
    )


def _component(
    name: str,
    version: str,
    kind: ComponentType,
    ecosystem: str,
    *,
    namespace: str | None = None,
    hashes: Iterable[str] = (),
    **qualifiers: str,
) -> Component:
    url = PackageURL(ecosystem, namespace, name, version, qualifiers)
    return Component(
        name=name,
        version=version,
        type=kind,
        purl=url,
        bom_ref=str(url),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in hashes],
    )


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    _, built, _ = wheel.name.split("-", 2)
    write(
        wheel.with_suffix(".cdx.json"), built, epoch_s=int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    )
