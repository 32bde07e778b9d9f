"""Images for pods of tests, made of crust's own: a shell under several names, and the sidecars that the chart names.

Crust's image has what a shell of tests needs, and the sidecars' programs need nothing. So nothing is downloaded, and
the layers are there once. `make image` builds it; `make kubernetes` builds the sidecars.
"""

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
    for name in sidecars().values():
        program = Path(name.partition(":")[0]).name
        layer = directory / f"{program}.tar"
        with tarfile.open(layer, "w") as tar:
            tar.add(PROGRAMS / program, f"usr/bin/{program}")
        _umoci("raw", "add-layer", "--image", base, "--tag", program, str(layer))
        _umoci("config", "--image", f"{layout}:{program}", *_entrypoint(program))
        tags[_within_registry(name)] = program
    with registry.serving(layout, tags) as url:
        yield url


def sidecars() -> dict[str, str]:
    """The images that the chart names, and third_party/kubernetes/sidecars builds, by what each does."""
    named = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))["sidecars"]
    return {role: named[role]["image"] for role in ("provisioner", "resizer", "snapshotter")}


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
