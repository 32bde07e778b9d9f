"""The command: reads the settings, and writes the directory that `kubectl apply -k` takes."""

import os
import tomllib
from pathlib import Path
from typing import Any

import click

from crust.cli.install import shipped
from crust.cli.manifest import objects
from crust.cli.programs import daemons
from crust.core.settings import loading
from crust.core.settings.driver import DriverSettings
from crust.host.process import oserrors
from crust.node.settings import NodeSettings


def run(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write the directory. Raises `InvalidSettings`, and one of crust's errors for what the kernel refuses."""
    source = shipped() / "kubernetes"
    text = _settings_text(config, source)
    settings = _settings(text)
    wanted = objects.Configuration(settings=settings, **choices)
    made = objects.composed(source, wanted)
    name = "node.toml" if isinstance(settings, NodeSettings) else "controller.toml"
    with oserrors.translating(f"cannot write {directory}"):
        made.write(directory, wanted.namespace or objects.NAMESPACE, (name, text))
    click.echo(f"kubectl apply -k {directory}")


def _settings(text: str) -> NodeSettings | DriverSettings:
    """Those of the controller if they say so, else those of the nodes. Without the environment of this process: the
    pods have their own.
    """
    if _is_of_controller(text):
        node_identity = {"node_id": os.uname().nodename}  # each pod has its own
        return loading.load(
            DriverSettings, "driver", toml=text, environ={}, flags={}, defaults=node_identity
        )
    return loading.load(NodeSettings, "node", toml=text, environ={}, flags={})


def _is_of_controller(text: str) -> bool:
    try:
        return tomllib.loads(text).get("mode") == "controller"
    except tomllib.TOMLDecodeError:
        return False  # refused when it is loaded, with its line


def _settings_text(config: Path | None, source: Path) -> str:
    path = config or daemons.installed("node")
    if path is not None:
        return daemons.text("node", path)
    return (source / "overlays" / "block-driver" / "node.toml").read_text(encoding="utf-8")
