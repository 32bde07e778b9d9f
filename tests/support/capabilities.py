"""What this machine lets tests do, found by trying the real thing once and undoing it.

A test that needs more than there is skips, and says what was missing. With `TESTS_REQUIRE=mount,loop,vm` a missing
capability is a failure instead, so that a CI which lost one cannot stay green by skipping.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo
from tests.support.kubernetes import daemons
from tests.support.third_party import csi_sanity, ember

GO_DRIVER = Path(__file__).parents[2] / ".cache" / "go" / "driver"
GO_TESTS = GO_DRIVER.with_name("deferral.test")
"""Of the driver's package."""

OF_MARKER = {"root": ("mount", "loop"), "vm": ("mount", "loop", "vm")}
"""The capabilities that each marker of pyproject.toml requires."""


def need(*names: str) -> None:
    """Skip the running test, or fail it where the capability is required, unless all `names` are there."""
    for name in names:
        if not (reason := missing(name)):
            continue
        if name in os.environ.get("TESTS_REQUIRE", "").split(","):
            pytest.fail(f"{name} is required and missing: {reason}", pytrace=False)
        pytest.skip(f"needs {name}: {reason}")


@functools.cache
def missing(name: str) -> str:
    """Why a capability is not there; empty when it is."""
    return _PROBES[name]()


def in_private_mount_namespace() -> bool:
    """Whether mounts of this process stay its own: an ancestor has another namespace, and none is shared with it."""
    own = os.readlink("/proc/self/ns/mnt")
    if all(namespace == own for namespace in _namespaces_of_ancestors()):
        return False
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        return not any("shared:" in line.partition(" - ")[0] for line in file)


def _namespaces_of_ancestors() -> Iterator[str]:
    """Of those that may be looked at: init's own is often not among them in a container."""
    pid = os.getppid()
    while pid > 0:
        with suppress(PermissionError):
            yield os.readlink(f"/proc/{pid}/ns/mnt")
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])


def _mount() -> str:
    if os.geteuid():
        return "not root"
    if not in_private_mount_namespace():
        return "not in a private mount namespace (`make integration` makes one)"
    with tempfile.TemporaryDirectory(prefix="crust-probe-") as directory:
        try:
            mount_api.mount_guard(directory)
            mount_api.unmount(directory)
        except errors.CrustError as err:
            return str(err)
    return ""


def _loop() -> str:
    if os.geteuid():
        return "not root"
    with tempfile.NamedTemporaryFile(prefix="crust-probe-") as file:
        file.truncate(1024 * 1024)
        try:
            loop.detach(loop.attach(file.name))
        except errors.CrustError as err:
            return str(err)
    return ""


def _cgroups() -> str:
    tops = [mount.target for mount in mountinfo.read_all() if mount.fs_type == "cgroup2"]
    if not tops:
        return "no unified hierarchy of control groups is mounted"
    try:
        os.rmdir(tempfile.mkdtemp(prefix="crust-probe-", dir=tops[0]))
    except OSError as err:
        return f"no control group can be made: {err}"
    return ""


def _vm() -> str:
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        return "qemu-system-x86_64 is not installed"
    # A machine without anything that quits at once: it proves the program and its libraries, in software.
    argv = [qemu, "-machine", "none,accel=tcg", "-display", "none", "-monitor", "stdio"]
    done = subprocess.run(argv, input=b"quit\n", capture_output=True, timeout=30, check=False)
    return "" if done.returncode == 0 else done.stderr.decode("utf-8", "replace")[-200:]


def _containerd() -> str:
    missing = [name for name in ("containerd", "ctr", "runc") if shutil.which(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


def _systemd() -> str:
    return "" if shutil.which("systemd-nspawn") else "systemd-nspawn is not installed"


def _made(program: Path, target: str = "third-party") -> str:
    return "" if program.exists() else f"{program} is missing: run make {target}"


_PROBES: dict[str, Callable[[], str]] = {
    "mount": _mount,
    "loop": _loop,
    "cgroups": _cgroups,
    "vm": _vm,
    "containerd": _containerd,
    "systemd": _systemd,
    "ember": lambda: _made(ember.PROGRAM),
    "csi-sanity": lambda: _made(csi_sanity.PROGRAM),
    "go-driver": lambda: _made(GO_DRIVER),
    "kubernetes": lambda: _made(daemons.PROGRAMS / "kubelet", "kubernetes"),
}
