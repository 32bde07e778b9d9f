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


def tag() -> str:
    """Of crust's image of this checkout."""
    return environments.version().replace("+", "-")


def own() -> Path:
    """The file of crust's image of this checkout."""
    path = CHECKOUT / "build" / f"crust-csi-{tag()}.tar"
    assert path.exists(), f"{path} is missing: run make image"
    return path


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of a registry that has them while the block runs; its files are below `directory`."""
    layout = directory / "layout"
    with tarfile.open(own()) as tar:
        tar.extractall(layout, filter="data")
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
                    _add_script(tar, path, text)
            _umoci("raw", "add-layer", "--image", base, "--tag", program, str(layer))
            _umoci("config", "--image", f"{layout}:{program}", *_entrypoint(f"/{program}"))
        tags[_within_registry(name)] = program
    with registry.serving(layout, tags) as url:
        yield url


def sidecars() -> dict[str, str]:
    """The images that the chart names, and third_party/kubernetes/sidecars builds, by what each does."""
    named = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))["sidecars"]
    return {role: named[role]["image"] for role in ("provisioner", "resizer", "snapshotter")}


def _add_script(tar: tarfile.TarFile, path: str, text: str) -> None:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.size = 0o755, len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))


def _of_storage_suite() -> list[str]:
    """The images of Kubernetes' external storage suite that one with a shell and agnhost takes the place of."""
    listing = (PROGRAMS / "e2e.test", "--list-images")
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()
    return [
        name for name in listed if re.search(r"/e2e-test-images/(agnhost|busybox|nginx):", name)
    ]


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
