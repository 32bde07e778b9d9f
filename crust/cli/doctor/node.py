"""The subject of the checks: a node's files below a root directory, its settings, and the proxy's answer.

Each check is a function of a node that gives findings, registered under its name.
"""

import enum
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crust.blockdriver.settings import DriverSettings
from crust.cli.programs import PROGRAMS, daemons
from crust.core import errors
from crust.core.settings.program import ProgramSettings
from crust.host import answers
from crust.host.files import listing, sealed
from crust.host.process import commands
from crust.inspection import views
from crust.kata.settings import KataSettings
from crust.node.settings import NodeSettings
from crust.proxy.settings import ProxySettings

CONFIG_DIR = str(daemons.CONFIG_DIR)
_PROXY_UNIT = "/etc/systemd/system/multi-user.target.wants/crust-proxy.service"
_KATA_UNIT = "/etc/systemd/system/multi-user.target.wants/crust-kata.service"


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `what` was found, `why` it matters, and what to do. `check` is the name of its check."""

    level: Level
    what: str
    why: str = ""
    todo: str = ""
    check: str = ""


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warning(what: str, why: str, todo: str) -> Finding:
    """A finding with which crust works, with fewer features."""
    return Finding(Level.WARNING, what, why, todo)


def error(what: str, why: str, todo: str) -> Finding:
    """A finding with which a part of crust does not work."""
    return Finding(Level.ERROR, what, why, todo)


def tried(look: Callable[[], object], what: str) -> Finding:
    """Ok, unless the look raises an error of crust."""
    try:
        look()
    except errors.CrustError as problem:
        return of_error(problem)
    return ok(what)


def of_error(problem: errors.CrustError) -> Finding:
    """The finding of an error of crust, with its own words."""
    return error(f"[{problem.error_name}] {problem.what}", problem.why, problem.hint)


Mismatches = Mapping[str, Sequence[Finding]]
"""Mismatches, by the driver's name."""


def _version_of(command: str) -> str:
    """The output of a command that prints a version; "" if its program is not installed. Raises `NotSeen`."""
    try:
        result = subprocess.run(command.split(), capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired as err:
        raise answers.NotSeen(f"cannot see the version by {command}", why=str(err)) from err
    return result.stdout


def _version_on_host(command: str) -> str:
    raise _not_seen_in_pod(f"the version by {command}", "a shell of the host")


def _not_seen_in_pod(what: str, needed: str) -> answers.NotSeen:
    why, hint = "this command runs in a pod", f"it needs {needed}"
    return answers.NotSeen(f"{what} cannot be seen from a pod", why=why, hint=hint)


@dataclass(frozen=True, slots=True)
class Node:
    """A node. Tests replace everything that is not a file."""

    root: Path = Path("/")
    run_dir: str = "/run/crust"
    release: str = field(default_factory=lambda: os.uname().release)
    version_of: Callable[[str], str] = _version_of
    """The output of a command that prints a version."""
    proxy: views.ProxyAnswer | errors.CrustError | None = None
    """The proxy's answer, or the error; None: it was not asked."""
    check_propagation: Callable[[str], None] | None = None
    """Raises the problem of the mounts below a directory; None: they are not checked."""
    has_seals: Callable[[Path], bool] = sealed.is_offered
    """Whether the filesystem of a directory has the immutable attribute."""
    csi_driver_mismatches: Callable[[ProxySettings], Coroutine[Any, Any, Mismatches]] | None = None
    """The mismatches of the cluster's CSIDriver objects and the settings; None: they are not checked."""
    is_pod: bool = False
    """Whether this command runs in a container of Kubernetes."""
    host_root: Path | None = None
    """In a pod: where the host's own files are, /proc/1/root; None if the pod does not see the host's process 1."""

    def on_host(self) -> "Node":
        """The node with the host's own files. Raises `NotSeen` in a pod that does not see them."""
        if not self.is_pod:
            return self
        if self.host_root is None:
            raise _not_seen_in_pod("the files of the host", "hostPID: true")
        return replace(self, root=self.host_root, is_pod=False, version_of=_version_on_host)

    @property
    def answer(self) -> views.ProxyAnswer | None:
        """The proxy's answer; None if it was not asked, or did not answer."""
        return self.proxy if isinstance(self.proxy, views.ProxyAnswer) else None

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def has(self, path: str) -> bool:
        """Whether an absolute path of the node exists. Raises an error of crust if that is not seen."""
        return listing.exists(os.path.join(self.root, path.lstrip("/")))

    def text(self, path: str) -> str:
        """The text of a file; empty if it does not exist. Raises `OSError`."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def has_program(self, name: str) -> bool:
        """Whether a program is installed where crust runs programs."""
        return any(self.has(f"{directory}/{name}") for directory in commands.PATH.split(":"))

    def has_library(self, name: str) -> bool:
        """Whether a shared library is installed where Debian and Fedora have theirs."""
        patterns = (f"{place}/{name}" for place in ("lib", "lib64", "lib/*-linux-gnu*"))
        return any(
            listing.matching(self.at(root), pattern)
            for pattern in patterns
            for root in ("/usr", "/")
        )

    def installed(self) -> dict[str, str]:
        """The existing settings files: program to path."""
        paths = {program: f"{CONFIG_DIR}/{program}.toml" for program in PROGRAMS}
        return {program: path for program, path in paths.items() if self.has(path)}

    def settings_of(self, program: str) -> ProgramSettings | None:
        """The settings of a program; None if there is no file, or it is refused."""
        try:
            return self.load(program)
        except errors.InvalidRequest:
            return None

    def load(self, program: str) -> ProgramSettings | None:
        """The settings of a program; None without a file. Raises `InvalidSettings` if the file is refused."""
        if program not in self.installed():
            return None
        return daemons.load(program, self.text(f"{CONFIG_DIR}/{program}.toml"))

    @property
    def is_one_process(self) -> bool:
        """Whether `crust node` runs here. `crust install` writes the settings of all programs: a unit decides."""
        files = self.installed()
        return "node" in files and not ("proxy" in files and self.has(_PROXY_UNIT))

    def proxy_settings(self) -> ProxySettings | None:
        """The proxy's settings, from the file that is used."""
        settings = self.settings_of("node" if self.is_one_process else "proxy")
        if isinstance(settings, NodeSettings):
            return settings.proxy
        return settings if isinstance(settings, ProxySettings) else None

    def driver_settings(self) -> tuple[DriverSettings, ...]:
        """The settings of crust's drivers, from the file that is used."""
        settings = self.settings_of("node" if self.is_one_process else "driver")
        drivers = settings.driver if isinstance(settings, NodeSettings) else (settings,)
        return tuple(driver for driver in drivers if isinstance(driver, DriverSettings))

    def has_own_driver(self) -> bool:
        """Whether crust's driver runs here, according to the settings."""
        if self.is_one_process:
            settings = self.settings_of("node")
            return not isinstance(settings, NodeSettings) or bool(settings.driver)
        return "driver" in self.installed() or "proxy" not in self.installed()

    def kata_settings(self) -> KataSettings | None:
        """The settings of `crust kata`, if it runs here: `crust install` writes the settings of all programs."""
        settings = self.settings_of("kata")
        if not isinstance(settings, KataSettings):
            return None
        return settings if self.has(_KATA_UNIT) or self.has(settings.run_dir) else None

    def kubelet_roots(self) -> tuple[str, ...]:
        """The directories that have targets."""
        settings = self.proxy_settings()
        return settings.target_roots if settings else ("/var/lib/kubelet",)


DoctorCheck = Callable[[Node], Iterator[Finding]]

CHECKS: dict[str, DoctorCheck] = {}
"""The checks by name, in the order in which they run."""


def doctor_check(name: str) -> Callable[[DoctorCheck], DoctorCheck]:

    def register(function: DoctorCheck) -> DoctorCheck:
        CHECKS[name] = function
        return function

    return register
