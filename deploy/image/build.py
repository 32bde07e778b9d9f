"""Builds the OCI image of crust: Debian's packages, and an environment in /opt/crust. No registry, no daemon.

mmdebstrap makes the root file system from the package lists that this machine uses, and umoci the image from it. The
wheels, of exactly the versions and hashes of requirements.txt, are fetched before, so nothing is downloaded inside.
Ceph's modules are Debian's, as no index has them, and the environment gets links to the two. QEMU with its driver for
RBD is the runtime's, and not here.

What a container of crust never runs is not in the image: the tools of packages, pip, Perl, programs that change the
user or enter a namespace. No file is set-user-ID or set-group-ID. The list of Debian's packages stays, for scanners.

The result is a tar file that containerd, podman and skopeo read; the image's name in it is its version, so
`--base-name` says the rest:

    ctr --namespace k8s.io images import --base-name docker.io/library/crust-csi build/crust-csi-<version>.tar

With `--architecture arm64` it is the image of another machine, whose programs QEMU's user mode runs during the build:
Debian's packages qemu-user-static and arch-test, with the kernel's binfmt_misc.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import sbom

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = (
    "bubblewrap", "btrfs-progs", "e2fsprogs", "kmod", "libseccomp2", "python3", "python3-rados", "python3-rbd",
    "python3-venv", "tini", "util-linux", "xfsprogs",
)  # fmt: skip
_PURGED = (
    "python3-venv", "python3.11-venv", "python3-pip-whl", "python3-setuptools-whl", "python3-distutils",
    "python3-lib2to3", "adduser", "login", "passwd", "init-system-helpers", "debconf", "perl", "libperl5.36",
    "perl-modules-5.36", "perl-base", "dpkg",
)  # fmt: skip
"""What the build alone needs, in the order of removal: the scripts of a package may run programs of later ones."""
_UNUSED = (
    "etc/apt", "etc/dpkg", "opt/pip", "opt/wheels", "usr/bin/nsenter", "usr/bin/su", "var/cache", "var/lib/apt",
    "var/log",
)  # fmt: skip
"""Also what the build leaves: etc/apt names the mirrors of this machine, which may have a login in their names."""
_KEPT = "/usr/share/doc/*/copyright"
"""Licences demand it."""
_LEFT_OUT = ("/usr/share/doc/*/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
_CEPH = "usr/lib/python3/dist-packages"
_SITE = f"opt/crust/lib/python{PYTHON}/site-packages"
_IMPORTED = "import lightkube, opentelemetry.sdk, rados, rbd, yaml"
"""What engines and extras need: a build without it fails, and not a pod."""
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's name, which is OCI's too, and the one in the names of wheels."""
_PATH = "PATH=/opt/crust/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main() -> None:
    """The command; writes build/crust-csi-<version>.tar, or for another architecture …-<architecture>.tar."""
    (own,) = (name for name, machine in ARCHITECTURES.items() if machine == platform.machine())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=own)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    architecture = arguments.architecture
    ending = "" if architecture == own else f"-{architecture}"
    default = CHECKOUT / "build" / f"crust-csi-{tag_of(version())}{ending}.tar"
    output: Path = arguments.output or default
    missing = [name for name in ("mmdebstrap", "umoci") if shutil.which(name) is None]
    if missing or os.geteuid():
        sys.exit(
            f"error: needs root, and the packages {' '.join(missing or ('mmdebstrap', 'umoci'))}"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".image-") as directory:
        built = build(Path(directory), architecture)
        os.replace(built.with_suffix(".cdx.json"), output.with_suffix(".cdx.json"))
        os.replace(built, output)
    sys.stdout.write(f"{output}\n")


def version() -> str:
    """The version of this checkout, by its commit."""
    command = (sys.executable, "-m", "setuptools_scm", "--root", str(CHECKOUT))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tag_of(built: str) -> str:
    """The version as the tag of an image, which may hold no plus sign (OCI distribution-spec)."""
    return built.replace("+", "-")


def of_commit(field: str) -> str:
    """A field of this checkout's commit, by its letters in git-log(1); empty without git."""
    command = ("git", "-C", str(CHECKOUT), "log", "-1", f"--format=%{field}")
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def epoch_s() -> int:
    """The time of this checkout's commit, in Unix time; 0 without git."""
    return int(of_commit("ct") or 0)


def _labels() -> Iterator[tuple[str, str]]:
    """The annotations that the OCI image-spec defines."""
    yield "title", "crust-csi"
    yield "version", version()
    yield "licenses", "Apache-2.0"
    yield "base.name", f"debian:{SUITE}"
    yield "revision", of_commit("H")
    yield "created", datetime.fromtimestamp(epoch_s(), UTC).isoformat()


def build(directory: Path, architecture: str) -> Path:
    """Build in a directory that is removed afterwards; returns the image, beside which is its bill of materials.

    Raises `CalledProcessError`.
    """
    _fetch_wheels(directory / "wheels", ARCHITECTURES[architecture])
    _make_root(directory, architecture)
    layout = directory / "layout"
    image = f"{layout}:{tag_of(version())}"
    _run("umoci", "init", "--layout", layout)
    _run("umoci", "new", "--image", image)
    _run("umoci", "raw", "add-layer", "--image", image, directory / "root.tar")
    entrypoint = [f"--config.entrypoint={each}" for each in ("tini", "-s", "--", "crust")]
    _run(
        "umoci",
        "config",
        "--image",
        image,
        f"--architecture={architecture}",
        f"--config.env={_PATH}",
        *entrypoint,
        "--config.cmd=--help",
        *(f"--config.label=org.opencontainers.image.{key}={value}" for key, value in _labels()),
    )
    status = (directory / "root/var/lib/dpkg/status").read_text(encoding="utf-8")
    packages = sbom.debian_packages(status)
    sbom.write(directory / "image.cdx.json", version(), epoch_s=epoch_s(), debian=packages)
    with tarfile.open(directory / "image.tar", "w") as tar:
        for path in sorted(layout.iterdir()):
            tar.add(path, path.name)
    return directory / "image.tar"


def _fetch_wheels(wheels: Path, machine: str) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as built:  # setuptools writes beside the sources
        left_out = shutil.ignore_patterns(".*", "build", "tests", "*.egg-info")
        source = shutil.copytree(CHECKOUT, f"{built}/source", ignore=left_out)
        environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": version()}
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, source, env=environment)
    target = ("--only-binary=:all:", "--python-version", PYTHON)
    platforms = [f"--platform=manylinux{each}_{machine}" for each in ("2014", "_2_17", "_2_28")]
    listed = ("--require-hashes", "--requirement", sbom.REQUIREMENTS)
    _run(*pip, "download", *target, *platforms, "--dest", wheels, *listed)


def _make_root(directory: Path, architecture: str) -> None:
    root = directory / "root"
    _run(
        "mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=essential",
        f"--architectures={architecture}", f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={each}" for each in _LEFT_OUT), f"--dpkgopt=path-include={_KEPT}",
        SUITE, root, *_sources(),
    )  # fmt: skip
    shutil.copytree(directory / "wheels", root / "opt/wheels")
    _install(root)
    _remove_unused(root)
    # a container has its own /dev
    content = ("--exclude=./dev/*", "--numeric-owner", "--sort=name", f"--directory={root}", ".")
    _run("tar", "--create", f"--file={directory / 'root.tar'}", *content)


def _install(root: Path) -> None:
    """By a pip of an environment of its own, so that the environment of crust has none."""
    _run("chroot", root, "python3", "-m", "venv", "--without-pip", "/opt/crust")
    _run("chroot", root, "python3", "-m", "venv", "/opt/pip")
    pip = ("/opt/pip/bin/pip", "--quiet", "--disable-pip-version-check")
    wheels = [f"/opt/wheels/{wheel.name}" for wheel in sorted((root / "opt/wheels").glob("*.whl"))]
    _run("chroot", root, *pip, "--python=/opt/crust/bin/python", "install", "--no-deps", *wheels)
    for module in ("rados", "rbd"):
        (library,) = (root / _CEPH).glob(f"{module}.*.so")
        (root / _SITE / library.name).symlink_to(f"/{_CEPH}/{library.name}")
    _run("chroot", root, "/opt/crust/bin/python", "-c", _IMPORTED)


def _remove_unused(root: Path) -> None:
    """The machine's own dpkg removes packages, which the list of packages in the image then has no more."""
    essential = ("--force-depends", "--force-remove-essential", "--force-remove-protected")
    for package in _PURGED:
        _run("dpkg", f"--root={root}", *essential, "--purge", package)
    for name in _UNUSED:
        _run("rm", "-rf", root / name)
    _run("find", root, "-xdev", "-perm", "/6000", "-exec", "chmod", "a-s", "{}", "+")


def _sources() -> list[str]:
    """The package lists of this machine, which may have a mirror of its own; none: mmdebstrap's default."""
    etc = Path("/etc/apt")
    found = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("debian*"))]
    return [str(each) for each in found if each.is_file() and each.stat().st_size]


def _run(*command: object, env: Mapping[str, str] | None = None) -> None:
    subprocess.run([str(each) for each in command], check=True, env=env)


if __name__ == "__main__":
    main()
