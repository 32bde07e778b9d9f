"""The distribution's packages: resolved and fetched by apt, and unpacked into the cache.

apt verifies signatures and hashes; the SHA-256 that it prints identifies an image's inputs. Nothing is installed on
this machine. A fetched package stays in the cache under its file name, so a change of the agent fetches nothing.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.kata.guest import faults

Flavour = Literal["cloud", "standard"]

_META = {"cloud": "linux-image-cloud-amd64", "standard": "linux-image-amd64"}
_USERLAND = (
    "btrfs-progs",
    "busybox-static",
    "cryptsetup-bin",
    "e2fsprogs",
    "libargon2-1",
    "libblkid1",
    "libc6",
    "libcom-err2",
    "libcryptsetup12",
    "libdevmapper1.02.1",
    "libexpat1",
    "libext2fs2",
    "libffi8",
    "libinih1",
    "libjson-c5",
    "libpcre2-8-0",
    "libpopt0",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libselinux1",
    "libssl3",
    "libudev1",
    "liburcu8",
    "libuuid1",
    "python3.11-minimal",
    "xfsprogs",
    "zlib1g",
)
# Root's own cache directory is not readable by the _apt user, and apt would warn about each file.
_APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root")
_URI_LINE = re.compile(r"^'[^']+' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class Package:
    """One package as apt would fetch it now."""

    file_name: str
    sha256: str


def resolve(flavour: Flavour) -> tuple[Package, ...]:
    """The packages of the guest, including the kernel of `flavour`. Uses the network only if apt has no lists.

    Raises PackagesUnavailable.
    """
    try:
        return _resolve(flavour)
    except faults.PackagesUnavailable:
        run(("apt-get", "-qq", "update"))
        return _resolve(flavour)


def fetch(packages: Sequence[Package], into: Path) -> list[Path]:
    """Download the packages that are not in `into` yet; returns the paths, in order. Raises PackagesUnavailable."""
    into.mkdir(parents=True, exist_ok=True)
    missing = [p for p in packages if not (into / p.file_name).exists()]
    if missing:
        # apt renames a file to its name only after checking its hash, so a killed download leaves no partial file.
        names = tuple(_spec(p) for p in missing)
        done = subprocess.run([*_APT, "download", *names], cwd=into, capture_output=True, text=True)
        if done.returncode != 0:
            raise faults.PackagesUnavailable(names, done.stderr.strip()[-400:])
    return [into / p.file_name for p in packages]


def unpack(archives: Sequence[Path], into: Path) -> None:
    """Unpack archives over one another. Raises ImageToolFailed."""
    into.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        run(("dpkg-deb", "-x", str(archive), str(into)))


def run(argv: tuple[str, ...]) -> bytes:
    """Run a program of the builder and return its output. Raises ImageToolFailed."""
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError as err:
        raise faults.ImageToolFailed(argv, "the program is not installed") from err
    if done.returncode != 0:
        raise faults.ImageToolFailed(argv, done.stderr.decode(errors="replace").strip()[-400:])
    return done.stdout


def _resolve(flavour: Flavour) -> tuple[Package, ...]:
    names = (_kernel(_META[flavour]), *_USERLAND)
    argv = [*_APT, "--print-uris", "download", *names]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    matches = [m for m in map(_URI_LINE.match, done.stdout.splitlines()) if m]
    if done.returncode != 0 or len(matches) != len(names):
        raise faults.PackagesUnavailable(names, done.stderr.strip()[-400:])
    return tuple(
        sorted((Package(m["file"], m["sha256"]) for m in matches), key=lambda p: p.file_name)
    )


def _kernel(meta: str) -> str:
    shown = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", meta],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"^Depends:.*?\b(linux-image-\d\S*)", shown.stdout, re.MULTILINE)
    if match is None:
        raise faults.PackagesUnavailable((meta,), shown.stderr.strip()[-400:])
    return match[1]


def _spec(package: Package) -> str:
    name, version, _ = package.file_name.split("_")
    return f"{name}={version.replace('%3a', ':')}"
