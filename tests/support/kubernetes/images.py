"""Images for pods of tests, made of crust's own: a shell, what containerd keeps a pod's namespaces with, a sidecar.

Crust's image has what these need: a shell, Python and the messages of CSI. So nothing is downloaded, and the layers
are there once. `make image` builds it.
"""

import subprocess
import tarfile
from pathlib import Path

from tests.support import environments

CHECKOUT = Path(__file__).resolve().parents[3]
OWN = "docker.io/library/crust-csi"
TESTS = "localhost/crust-tests"
SHELL = f"{TESTS}:shell"
PROVISIONER = f"{TESTS}:provisioner"
_SIDECARS = Path("tests/support/kubernetes/sidecars")


def tag() -> str:
    """Of crust's image of this checkout."""
    return environments.version().replace("+", "-")


def own() -> Path:
    """The file of crust's image of this checkout."""
    path = CHECKOUT / "build" / f"crust-csi-{tag()}.tar"
    assert path.exists(), f"{path} is missing: run make image"
    return path


def make(directory: Path) -> Path:
    """The file of the images of `TESTS`."""
    layout = directory / "layout"
    with tarfile.open(own()) as tar:
        tar.extractall(layout, filter="data")
    layer = directory / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        for path in sorted((CHECKOUT / _SIDECARS).glob("*.py")):
            tar.add(path, f"opt/sidecars/{path.relative_to(CHECKOUT)}")
    base = f"{layout}:{tag()}"
    _umoci("config", "--image", base, "--tag", "shell", *_entrypoint("sleep", "infinity"))
    _umoci("raw", "add-layer", "--image", base, "--tag", "provisioner", str(layer))
    program = ("python", "-m", "tests.support.kubernetes.sidecars.provisioner")
    environment = "--config.env=PYTHONPATH=/opt/sidecars"
    _umoci("config", "--image", f"{layout}:provisioner", environment, *_entrypoint(*program))
    made = directory / "tests.tar"
    with tarfile.open(made, "w") as tar:
        for item in sorted(layout.iterdir()):
            tar.add(item, item.name)
    return made


def _entrypoint(*words: str) -> list[str]:
    return [
        "--clear=config.entrypoint",
        "--clear=config.cmd",
        *(f"--config.entrypoint={each}" for each in words),
    ]


def _umoci(*arguments: str) -> None:
    subprocess.run(["umoci", *arguments], check=True)
