"""Renders a directory of deploy/kubernetes: by kubectl, or by kustomize itself where kubectl is older than 1.21.

Such a kubectl, as Debian 12 has it, does not know kustomize's present form. `make third-party` builds kustomize then:
kustomize.txt alone has its version.
"""

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

PROGRAM = Path(__file__).parents[3] / ".cache" / "kustomize" / "kustomize"


def render(directory: Path) -> list[dict[str, Any]]:
    """The objects. A warning is a failure."""
    done = subprocess.run(
        [*_command(), str(directory)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def _command() -> tuple[str, ...]:
    """A kubectl since 1.21 has kustomize 4, and says its version since 1.24."""
    answer = subprocess.run(
        ["kubectl", "version", "--client"], capture_output=True, text=True, check=False
    )
    if "Kustomize Version: v" in answer.stdout:
        return ("kubectl", "kustomize")
    assert PROGRAM.exists(), f"kubectl is old, and {PROGRAM} is missing: run make third-party"
    return (str(PROGRAM), "build")
