"""The files below a directory that match a pattern. The library's glob leaves out what it cannot list."""

import fnmatch
import os
from pathlib import Path

from crust.host.files.durable import AnyPath
from crust.host.process import syscalls


def matching(root: AnyPath, pattern: str) -> list[Path]:
    """The paths below `root` that match the pattern part by part ("*/*.json"), sorted; hidden names too.

    A directory that does not exist has none. Raises an error of crust for one that cannot be listed.
    """
    name, _, below = pattern.partition("/")
    with syscalls.translating(f"cannot list {root}"):
        names = fnmatch.filter(syscalls.names_in(os.fspath(root)), name)
    paths = [Path(root, each) for each in sorted(names)]
    return [path for each in paths for path in matching(each, below)] if below else paths
