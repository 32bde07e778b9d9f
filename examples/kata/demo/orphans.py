"""The loop devices, mounts and processes of a run on this machine, to check that none is orphaned."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a run, at one point in time."""

    loops: frozenset[str]
    mounts: frozenset[str]
    processes: frozenset[str]

    def since(self, before: "Resources") -> list[str]:
        """The resources that `before` does not have, described."""
        return [
            *(f"loop device {loop}" for loop in sorted(self.loops - before.loops)),
            *(f"mount {mount}" for mount in sorted(self.mounts - before.mounts)),
            *(f"process {process}" for process in sorted(self.processes - before.processes)),
        ]


def find(base: Path) -> Resources:
    """Find the resources of the run below `base`: by backing file, by mount target, by command line."""
    root = str(base)
    return Resources(
        frozenset(loop for loop in _loops() if root in loop),
        frozenset(mount for mount in _mounts() if mount.startswith(root)),
        frozenset(_processes(root)),
    )


def _loops() -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [f"{path.parts[3]} of {path.read_text().strip()}" for path in files]


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines]


def _processes(base: str) -> list[str]:
    processes = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            arguments = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(base.encode() in argument for argument in arguments):
            processes.append(f"{directory.name} ({arguments[0].decode(errors='replace')})")
    return processes
