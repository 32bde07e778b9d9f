"""A control group of a test's own, in whichever hierarchy of this machine has the io controller.

Where nobody has mounted one, the test does, in its own mount namespace: v1, or v2 if the controller is claimed by it.
A group outlives its process, so a later run removes what a killed one left.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crust import volumes
from crust.host.cgroups import io_max
from crust.host.mounts import mount_api, mountinfo

_PREFIX = "crust-test-"
_V1 = {
    "read_iops": "blkio.throttle.read_iops_device",
    "write_iops": "blkio.throttle.write_iops_device",
    "read_bytes_per_second": "blkio.throttle.read_bps_device",
    "write_bytes_per_second": "blkio.throttle.write_bps_device",
}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class IoGroup:
    """A group below `root`. `legacy`: of control groups v1, where each group is asked for itself."""

    root: Path
    path: Path
    legacy: bool

    @property
    def name(self) -> str:
        """The value for the driver's setting `io_cgroup`."""
        return f"/{self.path.relative_to(self.root)}"

    def child(self, name: str) -> "IoGroup":
        """A new group in this one, as a container's is in a pod's."""
        path = self.path / name
        path.mkdir()
        return IoGroup(self.root, path, self.legacy)

    def limits_of(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        """The lines of this very group, read without the code under test (v1)."""
        if not self.legacy:
            return io_max.parse((self.path / "io.max").read_text(), device)
        return volumes.IoLimits(**{name: self._line(file, device) for name, file in _V1.items()})

    def run(self, *argv: str) -> str:
        """The output of a Python program that runs in this group."""
        enter = (
            f"import os, runpy, sys; open({str(self.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
            " sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        command = [sys.executable, "-c", enter, *argv]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=50
        ).stdout

    def _line(self, file: str, device: volumes.DeviceIdentity) -> int:
        wanted = f"{device.major}:{device.minor}"
        lines = (each.split() for each in (self.path / file).read_text().splitlines())
        return next((int(value) for name, value in lines if name == wanted), 0)


@contextmanager
def group() -> Iterator[IoGroup]:
    """A group, while the block runs; it and its processes are removed afterwards."""
    with _hierarchy() as (root, legacy):
        for left in root.glob(f"{_PREFIX}*"):
            if not os.path.exists(f"/proc/{left.name.removeprefix(_PREFIX).partition('-')[0]}"):
                _remove(left)
        path = root / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        path.mkdir()
        try:
            yield IoGroup(root, path, legacy)
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    for directory, _, _ in os.walk(path, topdown=False):
        with suppress(FileNotFoundError):
            os.rmdir(directory)


@contextmanager
def _hierarchy() -> Iterator[tuple[Path, bool]]:
    found = _mounted()
    if found is not None:
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="crust-cgroup-") as target:
        for kind in (["cgroup", "-o", "blkio"], ["cgroup2"]):
            mount = ["mount", "-t", *kind, "none", target]
            if subprocess.run(mount, check=False).returncode == 0:
                break
        try:
            found = _mounted()
            assert found is not None, "this kernel has no io controller"
            yield found
        finally:
            mount_api.unmount(target)


def _mounted() -> tuple[Path, bool] | None:
    for mount in mountinfo.read_all():
        root = Path(mount.target)
        if mount.fs_type == "cgroup" and "blkio" in mount.super_options:
            return root, True
        if mount.fs_type == "cgroup2" and "io" in (root / "cgroup.controllers").read_text().split():
            if "io" not in (root / "cgroup.subtree_control").read_text().split():
                (root / "cgroup.subtree_control").write_text("+io")
            return root, False
    return None
