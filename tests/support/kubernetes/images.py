"""Images for pods of tests, made of crust's own: a shell under several names, and the sidecars that the chart names.

Crust's image has what a shell of tests needs, and the sidecars' programs need nothing. So nothing is downloaded, and
the layers are there once. `make image` builds it; `make kubernetes` builds the sidecars.
"""

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support import chart, environments
from tests.support.kubernetes import registry
from tests.support.kubernetes.daemons import PROGRAMS

CHECKOUT = Path(__file__).resolve().parents[3]
SHELL = "docker.io/library/busybox:latest"
"""The name in docs/kubernetes.md, and in the tests."""
SANDBOX = "registry.k8s.io/pause:tests"
"""What containerd keeps a pod's namespaces with."""
_SHELLS = (SHELL, SANDBOX)
ATTACHER = "registry.k8s.io/sig-storage/csi-attacher:v4.13.0"
"""Of a driver that crust wraps: the chart has no driver whose controller attaches."""
_SCRIPTS = {
    "usr/bin/mount": "#!/bin/sh\nwhile read -r device path type options _; do\n"
    'echo "$device on $path type $type ($options)"\ndone </proc/self/mounts\n',
    "usr/bin/nsenter": '#!/bin/sh\nshift 2\nexec chroot /rootfs "$@"\n',
}
"""What the suite runs and crust's image lacks. Its nsenter would enter process 1, whose mounts are not the node's."""
_VERSION_FILE = "opt/crust/lib/python3.11/site-packages/crust/_version.py"


def tag() -> str:
    """Of crust's image of this checkout."""
    return environments.version().replace("+", "-")


@dataclass(frozen=True, slots=True)
class Build:
    """An image of crust, whose file is in `build` of a checkout, as `make image` leaves it."""

    tag: str
    checkout: Path

    @property
    def file(self) -> Path:
        return self.checkout / "build" / f"crust-csi-{self.tag}.tar"


def own() -> Build:
    """That of this checkout."""
    build = Build(tag(), CHECKOUT)
    assert build.file.exists(), f"{build.file} is missing: run make image"
    return build


def of_another_version(directory: Path) -> Build:
    """The same programs, which say another version; its checkout, a new directory, has the chart of this one."""
    build = Build("0.1.dev99999", directory)
    (directory / "build").mkdir(parents=True)
    (directory / "deploy").symlink_to(CHECKOUT / "deploy")
    layout, layer = directory / "layout", directory / "version.tar"
    _extract(layout)
    with tarfile.open(layer, "w") as tar:
        _add(tar, _VERSION_FILE, f'__version__ = "{build.tag}"\n', 0o644)
    base = f"{layout}:{tag()}"
    _umoci("raw", "add-layer", "--image", base, "--tag", build.tag, str(layer))
    _umoci("rm", "--image", base)
    _umoci("gc", "--layout", str(layout))
    with tarfile.open(build.file, "w") as tar:
        for path in sorted(layout.iterdir()):
            tar.add(path, path.name)
    return build


def _extract(layout: Path) -> None:
    with tarfile.open(own().file) as tar:
        tar.extractall(layout, filter="data")


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of a registry that has them while the block runs; its files are below `directory`."""
    layout = directory / "layout"
    _extract(layout)
    base = f"{layout}:{tag()}"
    _umoci("config", "--image", base, "--tag", "shell", *_entrypoint("sleep", "infinity"))
    tags = {_within_registry(name): "shell" for name in _SHELLS}
    of_suite = _of_storage_suite()
    for name in (*sidecars().values(), ATTACHER, *of_suite):
        program = "agnhost" if name in of_suite else Path(name.rpartition(":")[0]).name
        if program not in tags.values():
            layer = directory / f"{program}.tar"
            with tarfile.open(layer, "w") as tar:
                tar.add(PROGRAMS / program, program)
                for path, text in _SCRIPTS.items() if name in of_suite else ():
                    _add(tar, path, text, 0o755)
            _umoci("raw", "add-layer", "--image", base, "--tag", program, str(layer))
            _umoci("config", "--image", f"{layout}:{program}", *_entrypoint(f"/{program}"))
        tags[_within_registry(name)] = program
    with registry.serving(layout, tags) as url:
        yield url


def sidecars() -> dict[str, str]:
    """The images that the chart names, and third_party/kubernetes/sidecars builds, by what each does."""
    named = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))["sidecars"]
    return {role: named[role]["image"] for role in ("provisioner", "resizer", "snapshotter")}


def _add(tar: tarfile.TarFile, path: str, text: str, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.size = mode, len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))


def _of_storage_suite() -> list[str]:
    """The images of Kubernetes' external storage suite that one with a shell and agnhost takes the place of."""
    listing = (PROGRAMS / "e2e.test", "--list-images")
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()
    taken = re.compile(r"/e2e-test-images/(agnhost|busybox|glibc-dns-testing|nginx):")
    return list(filter(taken.search, listed))


def _within_registry(name: str) -> str:
    return name.partition("/")[2]


def _entrypoint(*words: str) -> list[str]:
    return [
        "--clear=config.entrypoint",
        "--clear=config.cmd",
        *(f"--config.entrypoint={each}" for each in words),
    ]


def _umoci(*arguments: str) -> None:
    subprocess.run(["umoci", *arguments], check=True)
