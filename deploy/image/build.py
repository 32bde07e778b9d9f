"""Builds the OCI image of crust: Debian's packages, and an environment in /opt/crust. No registry, no daemon.

mmdebstrap makes the root file system from the package lists that this machine uses, and umoci the image from it. The
wheels are fetched before, so nothing is downloaded inside. Ceph's modules are Debian's, as no index has them, and the
environment gets links to the two. QEMU, with its driver for RBD, is the runtime's, and not here. The result is a tar
file that containerd, podman and skopeo read; the image's name in it is its version, so `--base-name` says the rest:

    ctr --namespace k8s.io images import --base-name docker.io/library/crust-csi build/crust-csi-<version>.tar
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import crust

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE, PYTHON = "bookworm", "3.11"
EXTRAS = "kubernetes"
PACKAGES = (
    "bubblewrap", "btrfs-progs", "e2fsprogs", "kmod", "libseccomp2", "mount", "python3", "python3-rados",
    "python3-rbd", "python3-venv", "tini", "util-linux", "xfsprogs",
)  # fmt: skip
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
_CEPH = "ln -s /usr/lib/python3/dist-packages/{rados,rbd}.*.so /opt/crust/lib/python*/site-packages"
_IMPORTED = "import lightkube, rados, rbd, yaml"
"""What engines and extras need: a build without it fails, and not a pod."""
_PATH = "PATH=/opt/crust/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main() -> None:
    """The command; writes build/crust-csi-<version>.tar."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = CHECKOUT / "build" / f"crust-csi-{crust.__version__}.tar"
    parser.add_argument("--output", type=Path, default=default)
    output: Path = parser.parse_args().output
    missing = [name for name in ("mmdebstrap", "umoci") if shutil.which(name) is None]
    if missing or os.geteuid():
        sys.exit(
            f"error: needs root, and the packages {' '.join(missing or ('mmdebstrap', 'umoci'))}"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".image-") as directory:
        built = build(Path(directory))
        os.replace(built, output)
    sys.stdout.write(f"{output}\n")


def build(directory: Path) -> Path:
    """Build in a directory that is removed afterwards; returns the image. Raises `CalledProcessError`."""
    _fetch_wheels(directory / "wheels")
    _make_root(directory)
    layout = directory / "layout"
    image = f"{layout}:{crust.__version__}"
    _run("umoci", "init", "--layout", layout)
    _run("umoci", "new", "--image", image)
    _run("umoci", "raw", "add-layer", "--image", image, directory / "root.tar")
    entrypoint = [f"--config.entrypoint={each}" for each in ("tini", "-s", "--", "crust")]
    _run(
        "umoci",
        "config",
        "--image",
        image,
        f"--config.env={_PATH}",
        *entrypoint,
        "--config.cmd=--help",
    )
    with tarfile.open(directory / "image.tar", "w") as tar:
        for path in sorted(layout.iterdir()):
            tar.add(path, path.name)
    return directory / "image.tar"


def _fetch_wheels(wheels: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as built:  # setuptools writes beside the sources
        left_out = shutil.ignore_patterns(".*", "build", "tests", "*.egg-info")
        source = shutil.copytree(CHECKOUT, f"{built}/source", ignore=left_out)
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, source)
    (own,) = wheels.glob("crust_csi-*.whl")
    target = ("--only-binary=:all:", "--python-version", PYTHON)
    machine = platform.machine()
    platforms = [f"--platform=manylinux{each}_{machine}" for each in ("2014", "_2_17", "_2_28")]
    _run(*pip, "download", *target, *platforms, "--dest", wheels, f"{own}[{EXTRAS}]")


def _make_root(directory: Path) -> None:
    pip = f"/opt/crust/bin/pip --quiet install --no-index --find-links /opt/wheels 'crust-csi[{EXTRAS}]'"
    steps = (
        f"copy-in {directory}/wheels /opt",
        f'chroot "$1" sh -c "python3 -m venv /opt/crust && {pip} && rm -r /opt/wheels"',
        f'chroot "$1" bash -c "{_CEPH}"',
        f'chroot "$1" /opt/crust/bin/python -c "{_IMPORTED}"',
        # the mirrors of the machine that builds, which may have a login in their names
        'rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d "$1"/etc/apt/auth.conf*',
        'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*',
    )
    _run(
        "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={each}" for each in _LEFT_OUT),
        *(f"--customize-hook={each}" for each in steps), SUITE, directory / "root.tar", *_sources(),
    )  # fmt: skip


def _sources() -> list[str]:
    """The package lists of this machine, which may have a mirror of its own; none: mmdebstrap's default."""
    etc = Path("/etc/apt")
    found = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("debian*"))]
    return [str(each) for each in found if each.is_file() and each.stat().st_size]


def _run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True)


if __name__ == "__main__":
    main()
