"""The command: reads the settings, prints the objects as YAML documents, for `kubectl apply -f -`."""

import os
import tomllib
from pathlib import Path
from typing import Any

import click

from crust import errors
from crust.cli.install import shipped
from crust.cli.programs import daemons
from crust.node.settings import NodeSettings
from crust.settings import loading
from crust.settings.driver import DriverSettings


def run(config: Path | None, **choices: Any) -> int:
    """Print; returns the exit code."""
    try:
        click.echo(_text(config, choices), nl=False)
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 2
    return 0


def _text(config: Path | None, choices: dict[str, Any]) -> str:
    try:
        import yaml

        from crust.cli.manifest import objects
    except ImportError as error:
        raise loading.InvalidSettings(
            "driver manifest", "it needs PyYAML: install crust-csi[kubernetes]"
        ) from error
    source = shipped() / "kubernetes"
    text = _settings_text(config, source)
    wanted = objects.Configuration(text=text, settings=_settings(text), **choices)
    return str(yaml.safe_dump_all(objects.made(source, wanted), sort_keys=False, width=120))


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
