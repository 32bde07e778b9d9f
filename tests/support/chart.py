"""The chart of deploy/helm, as helm renders it. As a command: writes deploy/kubernetes, the plain manifests.

With `--check` the command writes nothing, and names the files that are not what the chart renders. helm is built by
`make third-party`: third_party/helm.txt alone has its version.
"""

import argparse
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[2]
HELM = CHECKOUT / ".cache" / "helm" / "helm"
CHART = CHECKOUT / "deploy" / "helm" / "crust"
CHOICES = CHECKOUT / "deploy" / "helm" / "choices"
MANIFESTS = CHECKOUT / "deploy" / "kubernetes"
NAMESPACE = "crust-system"
_HEAD = "# Rendered by `make manifests` from deploy/helm/choices/{name}: change the chart, or its values.\n"

Object = dict[str, Any]


def run(values: str) -> "subprocess.CompletedProcess[str]":
    """`helm template` with the text of a values file."""
    assert HELM.exists(), f"{HELM} is missing: run make third-party"
    command = [str(HELM), "template", "crust", str(CHART), f"--namespace={NAMESPACE}", "--values=-"]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False)


@functools.cache
def text(values: str) -> str:
    """The manifests. A warning is a failure."""
    done = run(values)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def objects(values: str = "{}") -> list[Object]:
    """The objects of these values."""
    return [item for item in yaml.safe_load_all(text(values)) if item]


def choice(name: str) -> str:
    """The values of a choice."""
    return (CHOICES / f"{name}.yaml").read_text(encoding="utf-8")


def of_kind(items: list[Object], *kinds: str) -> list[Object]:
    """The objects of these kinds."""
    return [item for item in items if item["kind"] in kinds]


def one(items: list[Object], kind: str, name: str = "") -> Object:
    """The one object of the kind, and of the name."""
    (only,) = (
        item for item in of_kind(items, kind) if not name or item["metadata"]["name"] == name
    )
    return only


def settings(items: list[Object], file: str = "node.toml") -> str:
    """The text of the settings file in the ConfigMap that has it."""
    (found,) = (item["data"][file] for item in of_kind(items, "ConfigMap") if file in item["data"])
    return str(found)


def plain_manifests() -> dict[Path, str]:
    """The content of each file of deploy/kubernetes."""
    return {
        MANIFESTS / path.name: _HEAD.format(name=path.name) + text(path.read_text(encoding="utf-8"))
        for path in sorted(CHOICES.glob("*.yaml"))
    }


def stale() -> list[str]:
    """The files of deploy/kubernetes that are not what the chart renders, missing ones and others among them."""
    wanted = plain_manifests()
    there = {path: path.read_text(encoding="utf-8") for path in MANIFESTS.glob("*.yaml")}
    return sorted(path.name for path in {*wanted, *there} if wanted.get(path) != there.get(path))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        for path, content in plain_manifests().items():
            path.write_text(content, encoding="utf-8")
    elif found := stale():
        sys.exit(f"not what the chart renders: {', '.join(found)}; run `make manifests`")


if __name__ == "__main__":
    main()
