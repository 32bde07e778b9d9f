"""Whether an installation of Kata hands a block device to its virtual machine: read before its handler is registered.

If its configuration forbids block devices, Kata's Go runtime silently starts a container on the host's directory; by
default it forbids them. So a handler is registered only if the configuration allows them. A handler that the settings
name is crust kata's own, registered or not: a volume that was published to it before stays refused while its
configuration does not fit. Before each create the configuration is read again if one of its files has changed (inode,
time, size).

An installation that was run with real shims passes (docs/kata.md). An untested installation that may work passes if
the runtime's setting `unproven` is on; an installation that cannot work never passes.
"""

import contextlib
import os
import re
import subprocess
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.host.process import syscalls
from crust.kata.evidence import Kind
from crust.kata.settings import KataRuntime

FEATURES_RS = frozenset({HandlerFeature.READ_ONLY, HandlerFeature.STATS})
"""The features of runtime-rs since 4.0: it never applies a group."""
FEATURES = FEATURES_RS | {HandlerFeature.GROUP, HandlerFeature.GROUP_CHANGE_POLICY}
"""The features of Kata's Go runtime for a direct volume, with every hypervisor."""

_DROP_INS = "config.d"
_VERSION_S = 5.0
_VERSION_TEXT = re.compile(r"shim \((?P<language>Golang|Rust)\).*?version: (?P<version>\d+\.\d+)")
_ABSENT_DRIVER = {Kind.GO: "virtio-scsi", Kind.RUST: "virtio-blk-pci"}
"""The block driver of a configuration that names none: the runtime's own default."""
_PROVEN_DRIVERS = {
    (Kind.GO, "clh"): ("virtio-blk",),
    (Kind.GO, "qemu"): ("virtio-scsi", "virtio-blk"),
    (Kind.RUST, "clh"): ("virtio-blk-pci",),
    (Kind.RUST, "qemu"): ("virtio-scsi", "virtio-blk-pci"),
}
_REFUSED_HYPERVISORS = {
    "remote": "its sandboxes run on other machines (peer pods), which do not have this node's devices",
    "firecracker": "Firecracker attaches every disk writable, also that of a read-only volume",
    "stratovirt": "StratoVirt was never run with crust",
    "dragonball": "a machine of Dragonball is a thread of Kata's shim, and no process of its own",
}
Version = tuple[int, int]
Stamp = tuple[tuple[str, int, int, int], ...]


class KataUnfit(errors.NotReady):
    def __init__(self, path: Path, why: str, hint: str) -> None:
        super().__init__(
            f"Kata's configuration {path} cannot be used for deferred volumes", why=why, hint=hint
        )


@dataclass(frozen=True, slots=True)
class Installation:
    """An installation that may get volumes. `version` (0, 0): the settings do not name its program."""

    kind: Kind
    version: Version = (0, 0)
    flushes_dropped: errors.NotReady | None = field(default=None, compare=False)
    """With its configuration a guest's flush succeeds that did not reach the disk."""

    @property
    def features(self) -> frozenset[HandlerFeature]:
        """What its handler offers for a volume."""
        if self.kind is Kind.GO:
            return FEATURES
        return FEATURES_RS if self.version >= (4, 0) else FEATURES_RS - {HandlerFeature.READ_ONLY}


class Configurations:
    """The installation of each of our handlers. Functions block."""

    def __init__(self, runtimes: Iterable[KataRuntime]) -> None:
        self._runtimes = {volumes.HandlerName(runtime.name): runtime for runtime in runtimes}
        self._checked: dict[volumes.HandlerName, tuple[Stamp, Installation | KataUnfit]] = {}
        self._first: dict[volumes.HandlerName, Installation] = {}

    @property
    def handlers(self) -> Collection[volumes.HandlerName]:
        """Our handlers: all that the settings name, whether their installations fit or not."""
        return self._runtimes.keys()

    def check_kata(self, handler: volumes.HandlerName) -> Installation:
        """Raise `KataUnfit` if the handler's installation must not get a volume; reads only changed files."""
        runtime = self._runtimes[handler]
        files = _files(Path(runtime.configuration))
        if runtime.shim:
            files.append(Path(runtime.shim))
        looks: list[tuple[str, int, int, int]] = []
        for file in files:
            seen = syscalls.translating(f"cannot look at {file}")
            with seen, contextlib.suppress(FileNotFoundError):
                status = os.stat(file)
                looks.append((str(file), status.st_ino, status.st_mtime_ns, status.st_size))
        stamp = tuple(looks)
        known_stamp, result = self._checked.get(handler, (None, None))
        if result is None or known_stamp != stamp:
            try:
                result = check_configuration(runtime, read(Path(runtime.configuration)))
            except KataUnfit as error:
                result = error
            self._checked[handler] = (stamp, result)
        if isinstance(result, KataUnfit):
            raise result
        if self._first.setdefault(handler, result) != result:
            raise KataUnfit(
                Path(runtime.configuration),
                "it belongs to another runtime or version of Kata than at the start of crust kata",
                "restart crust kata, which then registers what this version can do",
            )
        return result

    def unfit(self) -> Iterator[KataUnfit]:
        """Why installations must not get volumes now."""
        for handler in self.handlers:
            try:
                self.check_kata(handler)
            except KataUnfit as error:
                yield error


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


def check_configuration(runtime: KataRuntime, configuration: dict[str, Any]) -> Installation:
    """Raise KataUnfit for the first key that must change, with the value to set."""
    path = Path(runtime.configuration)
    settings, hypervisors = configuration.get("runtime", {}), configuration.get("hypervisor", {})
    if not hypervisors or not all(isinstance(table, dict) for table in hypervisors.values()):
        raise KataUnfit(
            path, "it has no table [hypervisor.…]", "give Kata's own configuration.toml"
        )
    kind = Kind.RUST if "name" in settings else Kind.GO
    for name, hypervisor in hypervisors.items():
        _check_hypervisor(path, kind, name, hypervisor)
        if runtime.unproven:
            continue
        driver, shared_fs = _driver(kind, hypervisor), hypervisor.get("shared_fs") or "virtio-fs"
        for key, value, proven in (
            ("the hypervisor", name, [proven for of, proven in _PROVEN_DRIVERS if of is kind]),
            ("block_device_driver", driver, _PROVEN_DRIVERS.get((kind, name), ())),
            ("shared_fs", shared_fs, ("virtio-fs",)),
        ):
            if value not in proven:
                alone = " and ".join(proven)
                raise KataUnfit(
                    path,
                    f"[hypervisor.{name}] {key} is {value}, and {alone} alone was run with Kata's {kind.value}",
                    f"use {' or '.join(proven)}; or set unproven = true for this runtime in kata.toml, and test it",
                )
    installation = Installation(
        kind, _version(runtime, kind), _flushes_dropped(path, kind, hypervisors)
    )
    if kind is Kind.RUST and installation.version < (4, 0) and not runtime.unproven:
        raise KataUnfit(
            path,
            f"runtime-rs before 4.0 drops the options of a volume, and {runtime.shim} is older",
            "install Kata 4.1; or set unproven = true for this runtime in kata.toml",
        )
    return installation


def _check_hypervisor(path: Path, kind: Kind, name: str, hypervisor: dict[str, Any]) -> None:
    table = f"[hypervisor.{name}]"
    forbids = hypervisor.get("disable_block_device_use", kind is Kind.GO) is not False
    lacks_disk = "share the host's directory" if kind is Kind.GO else "attach no disk"
    driver = _driver(kind, hypervisor)
    refused = (
        (
            name in _REFUSED_HYPERVISORS,
            f"{table}: {_REFUSED_HYPERVISORS.get(name)}",
            "do not defer volumes to this runtime, or name a configuration with [hypervisor.qemu] or "
            "[hypervisor.clh]",
        ),
        (
            kind is Kind.RUST and (kind, name) not in _PROVEN_DRIVERS,
            f"{table}: with runtime-rs the process of Cloud Hypervisor or QEMU alone is found",
            "name a configuration with [hypervisor.qemu] or [hypervisor.clh]",
        ),
        (
            forbids,
            f"{table} disable_block_device_use is not false: Kata would {lacks_disk}",
            f"set disable_block_device_use = false in {table}",
        ),
        (
            driver == "nvdimm",
            f"{table} block_device_driver is nvdimm, which attaches a read-only volume writable",
            f'set block_device_driver = "virtio-scsi" in {table}',
        ),
        (
            kind is Kind.GO and name == "clh" and driver != "virtio-blk",
            f"{table} block_device_driver is {driver}, and Kata attaches virtio-blk alone to Cloud Hypervisor; "
            "where the key is missing it is virtio-scsi",
            f'set block_device_driver = "virtio-blk" in {table}',
        ),
        (
            hypervisor.get("rootless", False) is not False,
            f"{table} rootless is set: Kata keeps its volumes in another directory",
            f"set rootless = false in {table}",
        ),
        (
            hypervisor.get("shared_fs") == "none",
            f"{table} shared_fs is none: the guest has no directory to mount a volume below",
            f'set shared_fs = "virtio-fs" in {table}',
        ),
    )
    for is_so, why, hint in refused:
        if is_so:
            raise KataUnfit(path, why, hint)


def _driver(kind: Kind, hypervisor: dict[str, Any]) -> str:
    """The block driver that Kata takes: an empty text is an absent one, as in Kata."""
    return str(hypervisor.get("block_device_driver") or _ABSENT_DRIVER[kind])


def _flushes_dropped(
    path: Path, kind: Kind, hypervisors: dict[str, dict[str, Any]]
) -> errors.NotReady | None:
    """Why a flush may succeed and not reach the disk. QEMU with io_uring forgets one that failed (docs/kata.md)."""
    what = f"Kata's configuration {path} can lose what its guests have synced"
    for name, table in hypervisors.items():
        is_set = table.get("block_device_cache_set") is True
        if is_set and table.get("block_device_cache_noflush") is True:
            return errors.NotReady.named(
                "FlushesDropped",
                what,
                why="block_device_cache_set and block_device_cache_noflush are true: after a power cut a volume "
                "lacks what a guest has synced, and a database in it can be damaged",
                hint="set block_device_cache_noflush = false",
            )
        is_direct = table.get("block_device_cache_direct") is True and (is_set or kind is Kind.RUST)
        aio = table.get("block_device_aio") or "io_uring"
        driver = _driver(kind, table)
        if (name, driver, aio, is_direct) == ("qemu", "virtio-scsi", "io_uring", False):
            return errors.NotReady.named(
                "FlushesDropped",
                what,
                why="on virtio-scsi a guest repeats a flush that failed, and QEMU with io_uring answers that with "
                "success: in a full pool, and perhaps after an error of the disk, a sync succeeds whose data is lost",
                hint='set block_device_aio = "threads"',
            )
    return None


def _version(runtime: KataRuntime, kind: Kind) -> Version:
    """The shim's own version. Raises KataUnfit if it is another runtime's shim."""
    path, shim = Path(runtime.configuration), runtime.shim
    if not shim:
        if kind is Kind.GO:
            return (0, 0)
        raise KataUnfit(
            path,
            "it is a configuration of runtime-rs, and the version of Kata's shim is not known",
            "set shim to the path of its containerd-shim-kata-v2 (containerd's runtime_path) in kata.toml",
        )
    try:
        output = subprocess.run(
            [shim, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        raise KataUnfit(
            path, f"{shim} does not say its version: {err}", "correct shim in kata.toml"
        ) from err
    match = _VERSION_TEXT.search(output)
    if match is None or (match["language"] == "Rust") is not (kind is Kind.RUST):
        raise KataUnfit(
            path,
            f"it is a configuration of Kata's {kind.value}, and {shim} is not that: {output[:120].strip()}",
            "correct shim or configuration in kata.toml",
        )
    major, minor = map(int, match["version"].split("."))
    return (major, minor)


def _files(path: Path) -> list[Path]:
    """The configuration and its drop-ins of any name, as both runtimes find them: beside the file behind links."""
    try:
        with syscalls.translating(f"cannot look at {path}"):
            directory = Path(os.path.realpath(path, strict=True)).parent / _DROP_INS
    except errors.NotFound:
        return [path]  # whoever reads it says so
    try:
        with os.scandir(directory) as children:
            names = sorted(child.name for child in children if not child.is_dir())
    except FileNotFoundError:
        names = []
    except OSError as err:
        raise KataUnfit(directory, f"it cannot be listed: {err}", "make it readable") from err
    return [path, *(directory / name for name in names)]


def _merge(into: dict[str, Any], drop_in: dict[str, Any]) -> None:
    for key, value in drop_in.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
