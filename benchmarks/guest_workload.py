"""The workload in the guest: the guest's Python reads it from standard input, so it cannot import crust.

Arguments: a directory, a number of files, a number of writes. It prints nanoseconds per operation as JSON. Create is
open, write 100 bytes and close; stat asks for every file once more; a synced write is 4 KiB and fsync(2) in a file
that has its blocks already.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable


def timed(operation: "Callable[[str], object]", names: "Iterable[str]") -> "list[int]":
    """Nanoseconds of `operation` for each name."""
    taken = []
    for name in names:
        started_ns = time.perf_counter_ns()
        operation(name)
        taken.append(time.perf_counter_ns() - started_ns)
    return taken


def create(name: str) -> None:
    """A small file."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"x" * 100)
    os.close(fd)


def main(directory: str, files: int, writes: int) -> None:
    """Measure in `directory`, which is empty again afterwards."""
    names = [f"{directory}/{number:05d}" for number in range(files)]
    taken = {
        "create": timed(create, names),
        "stat": timed(os.stat, names),
        "unlink": timed(os.unlink, names),
    }
    path = f"{directory}/synced"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    block = b"x" * 4096
    os.pwrite(fd, block * 256, 0)
    os.fsync(fd)

    def synced_write(number: str) -> None:
        os.pwrite(fd, block, int(number) % 256 * 4096)
        os.fsync(fd)

    taken["synced 4 KiB write"] = timed(synced_write, map(str, range(writes)))
    os.close(fd)
    os.unlink(path)
    json.dump(taken, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
