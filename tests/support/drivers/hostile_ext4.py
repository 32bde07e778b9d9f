"""An ext4 as its owner, root on the disk, can write it: clean by its superblock, and without a bound."""

import itertools
import re
import struct
import subprocess
from pathlib import Path

_BLOCK = 4096
_POINTERS = _BLOCK // 4
NAMES_IN_BLOCK = 15


def _debugfs(image: Path | str, *commands: str) -> str:
    """Run commands of debugfs(8), and give what they print."""
    done = subprocess.run(
        ["debugfs", "-w", "-f", "-", str(image)],
        input="\n".join(commands) + "\n",
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def link_directories(image: Path | str, levels: int, names: int) -> None:
    """Make a chain of directories, d0 to the last, of which each has as many `names`: names ** levels paths."""
    paths = ["".join(f"/d{level}" for level in range(depth)) for depth in range(levels + 1)]
    makes = [f"mkdir {path}" for path in paths[1:]]
    links = [
        f"ln {path} {parent}/x{number}"
        for parent, path in itertools.pairwise(paths)
        for number in range(names - 1)
    ]
    _debugfs(image, *makes, *links)


def loop_directory(image: Path | str) -> None:
    """Make a directory that has a name for its parent."""
    _debugfs(image, "mkdir /a", "mkdir /a/b", "ln /a /a/b/c")


def repeat_block(image: Path | str, blocks: int) -> None:
    """Make a directory /big with one real block of names, which it has as often as `blocks` says."""
    names = [f"{number:03d}" + "n" * 240 for number in range(NAMES_IN_BLOCK)]
    _debugfs(image, "mkdir /big", *(f"write /dev/null /big/{name}" for name in names))
    listed = re.search(r"\(0\):(\d+)", _debugfs(image, "stat /big"))
    assert listed is not None
    data = int(listed[1])
    outer, inner = map(int, re.findall(r"\b\d+\b", _debugfs(image, "ffb 2"))[-2:])
    with open(image, "r+b") as file:
        file.seek(outer * _BLOCK)
        file.write(struct.pack("<I", inner) * _POINTERS)
        file.seek(inner * _BLOCK)
        file.write(struct.pack("<I", data) * _POINTERS)
    fields = {
        "flags": 0,
        **{f"block[{number}]": data for number in range(12)},
        "block[IND]": inner,
        "block[DIND]": outer,
        "block[TIND]": 0,
        "size": blocks * _BLOCK,
    }
    _debugfs(image, *(f"sif /big {name} {value}" for name, value in fields.items()))
