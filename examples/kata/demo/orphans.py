"""What of ours is on the machine: loop devices, mounts, processes, directories; and what a run has left behind."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Traces:
    """A look at the machine."""

    loops: frozenset[str]
    mounts: frozenset[str]
    processes: frozenset[str]

    def since(self, before: "Traces") -> list[str]:
        """What is here now and was not then, in words."""
        return [
            *(f"loop device {each}" for each in sorted(self.loops - before.loops)),
            *(f"mount {each}" for each in sorted(self.mounts - before.mounts)),
            *(f"process {each}" for each in sorted(self.processes - before.processes)),
        ]


def look(base: Path) -> Traces:
    """Look for what belongs to the run below `base`: by backing file, by mount target, by command line."""
    root = str(base)
    return Traces(
        frozenset(each for each in _loops() if root in each),
        frozenset(each for each in _mounts() if each.startswith(root)),
        frozenset(_processes(root)),
    )


def _loops() -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [f"{path.parts[3]} of {path.read_text().strip()}" for path in files]


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines]


def _processes(base: str) -> list[str]:
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        if any(base.encode() in word for word in words):
            found.append(f"{directory.name} ({words[0].decode(errors='replace')})")
    return found
