"""Whether an installation of Kata hands a block device to its virtual machine: read before its handler is registered.

Kata's Go runtime starts a container on the host's directory if its configuration forbids block devices, in silence,
and forbids them where nothing is said. So a handler is registered only if the configuration says otherwise. It is
read again when one of its files has changed (inode, time, size): before each create, not at the next restart.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crust.core import errors, volumes

_DROP_INS = "config.d"
Stamp = tuple[tuple[str, int, int, int], ...]


class KataUnfit(errors.NotReady):
    """Kata's configuration does not allow what a deferred volume needs."""

    def __init__(self, path: Path, why: str, hint: str) -> None:
        super().__init__(
            f"Kata's configuration {path} cannot be used for deferred volumes", why=why, hint=hint
        )


@dataclass(frozen=True, slots=True)
class _Checked:
    stamp: Stamp
    problem: errors.CrustError | None


class Configurations:
    """The configuration file of each of our handlers. Functions block."""

    def __init__(self, paths: Mapping[volumes.HandlerName, Path]) -> None:
        self._paths = paths
        self._checked: dict[volumes.HandlerName, _Checked] = {}

    def check(self, handler: volumes.HandlerName) -> None:
        """Raise `KataUnfit` if the handler's installation must not get a volume; reads only what has changed."""
        path = self._paths[handler]
        stamp = _stamp(path)
        checked = self._checked.get(handler)
        if checked is None or checked.stamp != stamp:
            checked = self._checked[handler] = _Checked(stamp, _problem(path))
        if checked.problem is not None:
            raise checked.problem


def _problem(path: Path) -> errors.CrustError | None:
    try:
        check(path, read(path))
    except KataUnfit as error:
        return error
    return None


def read(path: Path) -> dict[str, Any]:
    """The configuration with its drop-ins, as Kata merges them. Raises KataUnfit."""
    merged: dict[str, Any] = {}
    for file in _files(path):
        try:
            _merge(merged, tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as err:
            raise KataUnfit(
                file, f"it cannot be read: {err}", "correct the file, or its path in kata.toml"
            ) from err
    return merged


def check(path: Path, configuration: dict[str, Any]) -> None:
    """Raise KataUnfit for the first thing that must be otherwise, with the key and the value to set."""
    runtime, hypervisors = configuration.get("runtime", {}), configuration.get("hypervisor", {})
    if "name" in runtime:
        raise KataUnfit(
            path,
            "it is a configuration of runtime-rs, and this version knows Kata's Go runtime",
            "name a runtime with runtime_type io.containerd.kata.v2 and the Go shim, or do not defer volumes to it",
        )
    if not hypervisors or not all(isinstance(each, dict) for each in hypervisors.values()):
        raise KataUnfit(
            path, "it has no table [hypervisor.…]", "give Kata's own configuration.toml"
        )
    for name, hypervisor in hypervisors.items():
        if name == "remote":
            raise KataUnfit(
                path,
                "its sandboxes run on other machines (peer pods), which do not have this node's devices",
                "do not defer volumes to this runtime",
            )
        if hypervisor.get("disable_block_device_use", True) is not False:
            raise KataUnfit(
                path,
                f"[hypervisor.{name}] disable_block_device_use is not false: Kata would share the host's directory",
                f"set disable_block_device_use = false in [hypervisor.{name}]",
            )
        if hypervisor.get("rootless", False) is not False:
            raise KataUnfit(
                path,
                f"[hypervisor.{name}] rootless is set: Kata keeps its volumes in another directory",
                f"set rootless = false in [hypervisor.{name}]",
            )


def _files(path: Path) -> list[Path]:
    directory = path.parent / _DROP_INS
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".toml"))
    except OSError:
        names = []
    return [path, *(directory / name for name in names)]


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _stamp(path: Path) -> Stamp:
    return tuple(
        (str(file), status.st_ino, status.st_mtime_ns, status.st_size)
        for file in _files(path)
        if (status := _status(file)) is not None
    )


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
